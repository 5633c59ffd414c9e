"""Encore inside the loops of other packages: `transformers` for Hugging Face's Trainer, `lightning` for Lightning.

Each module imports its host when it is imported, and nothing else of Encore imports these modules. What they share is
in `planned_training`. A host whose loop calls the model needs no module: accelerate's is a recipe of docs/hosts.md.
"""
