"""What tests share: oracles, models, graphs, and ways to look at a step. Nothing here is a test."""
