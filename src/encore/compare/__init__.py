"""Encore compared with what else trains a model in less memory, on the same model and batch: the systems, the
interleaved rounds in which they are timed, and how the results are shown. No models and no plans."""
