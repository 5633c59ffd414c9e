"""Samples of PyTorch's databases that Encore leaves to plain PyTorch, in part or as a whole, and why; and the operators
whose bits differ from eager's. A sample of another operator, or with another reason, fails its test.
"""

from __future__ import annotations

SHAPE = "Dynamic shape operator"
"""The shape of a result depends on data: Dynamo ends the graph before the operator."""
NUMBER = "Data dependent operator"
"""A number that is read from a tensor decides: Dynamo ends the graph there."""
ITEM = "Unsupported Tensor.item() call"
"""The same, in the user's own words."""
FAKE = "Backend compiler exception"
"""AOTAutograd cannot trace the operator on tensors without data; Dynamo ends the graph before it and tries again."""
SKIPPED = "Attempted to call function marked as skipped"
"""Dynamo does not trace a function that is called, `warnings.warn` here."""
SPARSE = "sparse Tensor"
"""Dynamo traces no sparse tensors."""
NOTHING = "no graph reached Encore"
"""What is left of any of these reasons where Dynamo has given up on the same code before."""

REFUSED = {
    "combinations": SHAPE,
    "corrcoef": NUMBER,
    "cov": NUMBER,
    "index_fill": FAKE,
    "index_put": FAKE,
    "linalg.lstsq": SHAPE,
    "linalg.lstsq.grad_oriented": SHAPE,
    "masked_select": SHAPE,
    "narrow": FAKE,
    "nn.CTCLoss": SHAPE,
    "nn.GaussianNLLLoss": NUMBER,
    "nn.LinearCrossEntropyLoss": SKIPPED,
    "nn.Transformer": ITEM,
    "nn.TransformerEncoder": ITEM,
    "nn.functional.ctc_loss": SHAPE,
    "nn.functional.gaussian_nll_loss": NUMBER,
    "nn.functional.linear_cross_entropy.chunked": SKIPPED,
    "nn.functional.linear_cross_entropy.chunked_none": SKIPPED,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "tensor_split": NUMBER,
    "to_sparse": SPARSE,
}

DIFFERENT_BITS = {
    "addcdiv": "Dynamo takes torch.addcdiv(value=...) apart into div, mul and add before Encore sees it",
}
"""Operators whose bits differ from eager's in the eager lowering; they are as close to float64 as eager."""
