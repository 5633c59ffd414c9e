"""A user's callable -> the joint forward + backward graph of its training step, through Dynamo and AOTAutograd.

`repeats` traces long graphs by their distinct calls, `recurrent` and `packing` keep recurrent layers whole,
`unused_outputs` cuts a joint graph down to the gradients it receives; only `torch_private` uses PyTorch's private API.
Nothing here depends on plans.
"""
