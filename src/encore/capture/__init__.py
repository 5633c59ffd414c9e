"""A user's callable -> the joint forward + backward graph of its training step, through Dynamo and AOTAutograd.

`backend` is what Dynamo calls, `repeats` traces long graphs by their distinct calls, `session` remembers what was
compiled for one model, `torch_private` is the only file that touches PyTorch's private API.
"""

from encore.capture.session import CapturedGraph, Session, sessions

__all__ = ["CapturedGraph", "Session", "sessions"]
