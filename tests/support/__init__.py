"""What tests share: references, models, graphs, and measurements of a step. No tests."""
