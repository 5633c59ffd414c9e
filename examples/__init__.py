"""Programs that train with Encore: `python -m examples.demo` and `python -m examples.train`.

They run from the repository's root. They may import the package and `benchmarks`; neither imports them.
"""
