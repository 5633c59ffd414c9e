"""What the workloads learn from: grammars, sounds and pictures made here, and files of the user's.

Everything that is made is made from a generator, in pure Python and torch, so the same numbers give the same data on
every machine. Data to train on and data to score on never overlap; `split` tells one from the other.
What may not live here: models, and anything that is downloaded.
"""
