"""Small models as users write them: odd heads, shared weights, in-place writes, views, loops, custom functions.

Each entry of `USER_MODELS` makes a model and its input. A model returns its loss; what it draws comes from the global
generator. Nothing here is written for Encore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

BATCH, STEPS, WIDTH, SIDE = 16, 24, 32, 16
CLASSES = 10


class Function(nn.Module):
    """Layers by name, and the function that computes the loss with them."""

    def __init__(self, loss: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Tensor:
        return self.loss(self, *inputs)


Made = tuple[nn.Module, tuple[Any, ...]]


def rows() -> Tensor:
    return torch.randn(BATCH, STEPS, WIDTH)


def vectors() -> Tensor:
    return torch.randn(BATCH * 8, WIDTH)


def pictures(channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, SIDE, SIDE)


def tokens() -> Tensor:
    return torch.randint(CLASSES, (BATCH, STEPS))


def labels(count: int = BATCH) -> Tensor:
    return torch.randint(CLASSES, (count,))


# -- pictures --------------------------------------------------------------------------------------------------------


def two_heads() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        f = m.body(x)
        boxes = m.boxes(f).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        scores = m.scores(f).flatten(2).mean(2)
        return F.cross_entropy(scores, y) + F.smooth_l1_loss(boxes.sigmoid(), torch.zeros_like(boxes))

    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model = Function(loss, body=body, boxes=nn.Conv2d(16, 8, 1), scores=nn.Conv2d(16, CLASSES, 1))
    return model, (pictures(), labels())


def u_net() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        a = F.relu(m.down1(x))
        b = F.relu(m.down2(F.max_pool2d(a, 2)))
        up = m.up(b)
        y = m.last(torch.cat([a, up], 1))
        return F.binary_cross_entropy_with_logits(y, (x.sum(1, keepdim=True) > 0).to(y.dtype))

    layers = {"down1": nn.Conv2d(3, 8, 3, padding=1), "down2": nn.Conv2d(8, 16, 3, padding=1)}
    return Function(loss, **layers, up=nn.ConvTranspose2d(16, 8, 2, 2), last=nn.Conv2d(16, 1, 1)), (pictures(),)


def pixel_shuffle() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        small = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
        y = F.pixel_shuffle(m.b(F.gelu(m.a(small))), 2)
        return F.l1_loss(y, x) + F.pixel_unshuffle(y, 2).pow(2).mean()

    return Function(loss, a=nn.Conv2d(3, 16, 3, padding=1), b=nn.Conv2d(16, 12, 3, padding=1)), (pictures(),)


def normalizations() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        for conv, norm in zip(m.convs, m.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), 0.1)
        return x.pow(2).mean()

    convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=i % 2 == 0) for i in range(4))
    kinds: list[nn.Module] = [nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)]
    return Function(loss, convs=convs, norms=nn.ModuleList([*kinds, nn.LocalResponseNorm(3)])), (pictures(),)


def channels_last() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.net(x), y)

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.Hardswish(),
        nn.Conv2d(16, 24, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, CLASSES),
    )  # fmt: skip
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Function(loss, net=net), (pictures().to(memory_format=torch.channels_last), labels())


def squeeze_and_excite() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        gate = torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))))
        x = x * gate
        return (m.b(x) + x).abs().mean()

    convs = {"a": nn.Conv2d(3, 16, 3, padding=1), "b": nn.Conv2d(16, 16, 3, padding=1)}
    return Function(loss, **convs, down=nn.Conv2d(16, 4, 1), up=nn.Conv2d(4, 16, 1)), (pictures(),)


def patches() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        parts = F.unfold(x, 4, stride=4).transpose(1, 2)
        y = m.b(F.gelu(m.a(parts)))
        back = F.fold(y.transpose(1, 2), (SIDE, SIDE), 4, stride=4)
        return F.mse_loss(back, x)

    return Function(loss, a=nn.Linear(48, 96), b=nn.Linear(96, 48)), (pictures(),)


def pool_with_indices() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y, at = F.max_pool2d(F.relu(m.a(x)), 2, return_indices=True)
        y = F.max_unpool2d(torch.tanh(m.b(y)), at, [2, 2])
        return m.c(y).pow(2).mean()

    convs = {name: nn.Conv2d(3 if name == "a" else 8, 8, 3, padding=1) for name in "abc"}
    return Function(loss, **convs), (pictures(),)


def grid_sample() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        theta = m.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, [x.shape[0], 3, SIDE, SIDE], align_corners=False)
        return m.conv(F.grid_sample(x, grid, align_corners=False)).relu().mean()

    return Function(loss, where=nn.Linear(3 * SIDE * SIDE, 6), conv=nn.Conv2d(3, 8, 3)), (pictures(),)


def spectral_and_weight_norm() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        return F.softplus(-m.b(F.leaky_relu(m.a(x), 0.2)).mean((1, 2, 3))).mean()

    a = parametrizations.weight_norm(nn.Conv2d(3, 16, 3, padding=1))
    return Function(loss, a=a, b=parametrizations.spectral_norm(nn.Conv2d(16, 8, 3))), (pictures(),)


def conv_3d_and_1d() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = F.elu(m.a(x))
        y = m.b(F.avg_pool3d(y, 2).flatten(2))
        return F.glu(y, 1).mean().square() + y.std()

    return Function(loss, a=nn.Conv3d(2, 8, 3, padding=1), b=nn.Conv1d(8, 8, 5, dilation=2)), (
        torch.randn(4, 2, 8, 8, 8),
    )


# -- in-place writes, views, indices ---------------------------------------------------------------------------------


def slices_assigned() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        out[:, ::2] = m.a(x[:, ::2])
        out[:, 1::2] = torch.tanh(m.b(x[:, 1::2]))
        out[:, 0] += x[:, -1]
        out[..., :4].mul_(0.5)
        return (out * m.a(out)).mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (rows(),)


def views_of_views() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).view(BATCH, STEPS, 4, 8).transpose(1, 2)
        z = y[:, 1:3].reshape(BATCH, -1, 8).unflatten(1, (2, -1)).movedim(1, 2)
        y = torch.relu_(y * 2)
        w = y.diagonal(dim1=2, dim2=3).sum(-1) + z.mean((1, 3)).repeat(1, 2)
        return w.pow(2).sum() + y.select(1, 0).narrow(1, 2, 3).exp().mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH)), (rows(),)


def in_place_chain() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y = y.add_(1).mul_(y.sigmoid()).clamp_(min=-1)
        y = F.dropout(y, 0.2, inplace=True)
        y = F.relu_(m.b(y)) - x
        y[y > 1] = 0.25
        y[:, :4] = y[:, 4:8].neg()
        return y.square().mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (vectors(),)


def scatter_and_gather() -> Made:
    def loss(m: Any, x: Tensor, at: Tensor) -> Tensor:
        messages = F.relu(m.a(x[at[0]]) + m.b(x[at[1]]))
        summed = torch.zeros_like(x).index_add(0, at[1], messages)
        counts = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add_(0, at[1], torch.ones(at.shape[1], dtype=x.dtype))
        mean = summed / counts.clamp(min=1).unsqueeze(1)
        best = torch.zeros_like(x).scatter_reduce(0, at[1][:, None].expand_as(messages), messages, "amax")
        return m.c(torch.cat([mean, best], 1)).gather(1, at[:1, :8].t() % 4).pow(2).mean() + mean.var()

    layers = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH), "c": nn.Linear(2 * WIDTH, 4)}
    return Function(loss, **layers), (torch.randn(40, WIDTH), torch.randint(40, (2, 300)))


def index_put() -> Made:
    def loss(m: Any, x: Tensor, at: Tensor) -> Tensor:
        memory = torch.zeros(64, WIDTH, dtype=x.dtype)
        memory = memory.index_put((at,), m.write(x), accumulate=True)
        memory[at[:8]] = m.read(x[:8])
        return (m.read(memory).softmax(-1) * memory).sum() / 100

    return Function(loss, write=nn.Linear(WIDTH, WIDTH), read=nn.Linear(WIDTH, WIDTH)), (
        vectors(), torch.randint(64, (BATCH * 8,)),
    )  # fmt: skip


def sorted_and_cumulated() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        top, _ = y.topk(5, -1)
        ranked, _ = y.sort(-1, descending=True)
        survival = torch.cumprod(ranked.sigmoid(), -1) + torch.cumsum(y, 1).tanh() + torch.logcumsumexp(y, 2)
        return top.mean() + survival.mean() + y.median(-1).values.sum() + y.cummax(1).values.mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH)), (rows(),)


def masks_and_where() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y = torch.where(y > 0, y.sqrt().nan_to_num(0.0), y.exp()).masked_fill(x > 2, 0.0)
        y = y.clamp(0.1, 3).log() + torch.maximum(y, x) - torch.minimum(y, x * 2)
        return (y * torch.tril(torch.ones(STEPS, WIDTH, dtype=x.dtype))).abs().mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH)), (rows(),)


# -- sequences -------------------------------------------------------------------------------------------------------


def lstm_stack() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        out, (h, c) = m.rnn(x)
        return F.cross_entropy(m.head(out[:, -1] + h[-1].repeat(1, 2) + c.sum(0).repeat(1, 2)), y)

    rnn = nn.LSTM(WIDTH, 24, 2, batch_first=True, bidirectional=True, dropout=0.2)
    return Function(loss, rnn=rnn, head=nn.Linear(48, CLASSES)), (rows(), labels())


def packed_gru() -> Made:
    def loss(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, h = m.rnn(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return m.head(padded).pow(2).mean() + h.mean()

    return Function(loss, rnn=nn.GRU(WIDTH, 24, batch_first=True), head=nn.Linear(24, 3)), (
        rows(), torch.randint(1, STEPS + 1, (BATCH,)),
    )  # fmt: skip


def gru_cells() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 24)
        outs = []
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
            if t % 3 == 0:
                h = m.norm(h)
            outs.append(m.head(h))
        return torch.stack(outs, 1).pow(2).mean()

    return Function(loss, cell=nn.GRUCell(WIDTH, 24), norm=nn.LayerNorm(24), head=nn.Linear(24, 3)), (rows(),)


def lstm_cells_with_reset() -> Made:
    def loss(m: Any, x: Tensor, reset: Tensor) -> Tensor:
        h, c = m.start.weight[0].expand(BATCH, -1), m.start.weight[1].expand(BATCH, -1)
        total = x.new_zeros(())
        for t in range(0, STEPS, 2):
            keep = (~reset[:, t]).to(x.dtype).unsqueeze(1)
            h, c = m.cell(x[:, t], (h * keep, c * keep))
            total = total + (h * c).mean()
        return total

    return Function(loss, cell=nn.LSTMCell(WIDTH, 24), start=nn.Embedding(2, 24)), (
        rows(), torch.rand(BATCH, STEPS) < 0.2,
    )  # fmt: skip


def ctc() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        out, _ = m.rnn(x)
        scores = m.head(out).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((BATCH,), STEPS), torch.full((BATCH,), 6)
        return F.ctc_loss(scores, y, *sizes, zero_infinity=True)

    return Function(loss, rnn=nn.RNN(WIDTH, 24, batch_first=True), head=nn.Linear(24, CLASSES)), (
        rows(), torch.randint(1, CLASSES, (BATCH, 6)),
    )  # fmt: skip


# -- attention -------------------------------------------------------------------------------------------------------


def causal_attention() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(m.norm(x)).view(BATCH, STEPS, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
        hidden = torch.triu(torch.ones(STEPS, STEPS, dtype=torch.bool), 1)
        shares = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), 0.1)
        y = x + m.out((shares @ v).transpose(1, 2).flatten(2))
        y = y + m.swiglu(y).chunk(2, -1)[0].mul(F.silu(m.swiglu(y).chunk(2, -1)[1]))
        return y.pow(2).mean()

    layers = {"qkv": nn.Linear(WIDTH, 96), "out": nn.Linear(WIDTH, WIDTH), "swiglu": nn.Linear(WIDTH, 64)}
    return Function(loss, **layers, norm=nn.LayerNorm(WIDTH)), (rows(),)


def fused_attention() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y, weights = m.mha(x, x, x, need_weights=True)
        q = y.view(BATCH, STEPS, 4, 8).transpose(1, 2)
        z = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return z.mean() + y.pow(2).mean() + (weights * weights.log().nan_to_num()).sum() / 100

    return Function(loss, mha=nn.MultiheadAttention(WIDTH, 4, batch_first=True)), (rows(),)


def relative_positions() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        place = torch.arange(STEPS)
        bias = m.bias((place[:, None] - place[None, :]).clamp(-8, 8) + 8).permute(2, 0, 1)
        q, k = m.q(x).view(BATCH, STEPS, 4, 8), m.k(x).view(BATCH, STEPS, 4, 8)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + bias
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), q).flatten(2).pow(2).mean()

    layers = {"q": nn.Linear(WIDTH, WIDTH), "k": nn.Linear(WIDTH, WIDTH)}
    return Function(loss, bias=nn.Embedding(17, 4), **layers), (rows(),)


def rotary() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        angle = torch.arange(STEPS, dtype=x.dtype)[:, None] * torch.arange(16, dtype=x.dtype)
        y = torch.view_as_complex(m.a(x).view(BATCH, STEPS, 16, 2))
        turned = torch.view_as_real(y * torch.polar(torch.ones_like(angle), angle)).flatten(2)
        return F.cosine_similarity(turned, m.b(x), dim=-1).mean() + turned.var()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (rows(),)


def transformer_encoder() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.encoder(m.embed(x) + m.place.weight[:STEPS], src_key_padding_mask=x == 0)
        return F.cross_entropy((h @ m.embed.weight.t()).flatten(0, 1), y.flatten(), label_smoothing=0.1)

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    embeds = {"embed": nn.Embedding(CLASSES, WIDTH), "place": nn.Embedding(STEPS, WIDTH)}
    x = tokens()
    x[:, 0] = 1
    return Function(loss, encoder=encoder, **embeds), (x, tokens())


def mixture_of_experts() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        weights, at = m.route(x).softmax(-1).topk(2, -1)
        out = torch.stack([expert(x) for expert in m.experts], 2)
        picked = out.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, WIDTH))
        return (picked * weights.unsqueeze(-1)).sum(2).pow(2).mean()

    experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(4))
    return Function(loss, route=nn.Linear(WIDTH, 4), experts=experts), (rows(),)


# -- weights, modes, functions ---------------------------------------------------------------------------------------


def tied_embeddings() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(m.embed(x), 0.1)
        h = m.norm(h + torch.roll(h, 1, 1))
        return F.cross_entropy(F.linear(h, m.embed.weight).flatten(0, 1), y.flatten(), ignore_index=3)

    return Function(loss, embed=nn.Embedding(CLASSES, WIDTH), norm=nn.LayerNorm(WIDTH)), (tokens(), tokens())


def one_layer_three_times() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.mish(m.norm(m.a(x)))
        return (x @ m.a.weight).logsumexp(-1).mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH)), (rows(),)


def checkpointed() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.pow(2).mean()

    block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, WIDTH))
    return Function(loss, blocks=nn.ModuleList([block, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])), (rows(),)


def counted_buffer() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        m.norm.running = 0.9 * m.norm.running + 0.1 * y.detach().mean((0, 1))
        m.norm.count += 1
        return ((y - m.norm.running) * torch.rsqrt(y.var(0) + 1)).pow(2).mean() + m.norm(y).mean()

    norm = nn.LayerNorm(WIDTH)
    norm.register_buffer("running", torch.zeros(WIDTH))
    norm.register_buffer("count", torch.zeros((), dtype=torch.long))
    return Function(loss, a=nn.Linear(WIDTH, WIDTH), norm=norm), (rows(),)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.clamp(-1, 1), None


def custom_functions() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = Swish.apply(m.a(x))
        y = StraightThrough.apply(y, y.detach().abs().amax() / 127)
        return m.b(y).pow(2).mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (rows(),)


def functional_gradient() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        def energy(point: Tensor) -> Tensor:
            return m.b(torch.tanh(m.a(point))).sum()

        force = torch.func.vmap(torch.func.grad(energy))(x)
        return force.pow(2).mean() + m.a(x).mean()

    return Function(loss, a=nn.Linear(WIDTH, 48), b=nn.Linear(48, 1)), (vectors(),)


def vector_quantized() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        z = m.encode(x)
        at = torch.cdist(z.flatten(0, 1), m.codes.weight).argmin(-1)
        q = m.codes(at).view_as(z)
        through = z + (q - z).detach()
        return F.mse_loss(m.decode(through), x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    layers = {"encode": nn.Linear(WIDTH, 16), "decode": nn.Linear(16, WIDTH)}
    return Function(loss, codes=nn.Embedding(20, 16), **layers), (rows(),)


def variational() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        mean, log_var = m.encode(F.gelu(m.a(x))).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_var) * (torch.rand_like(mean) - 0.5)
        kl = F.kl_div(mean.log_softmax(-1), log_var.softmax(-1), reduction="batchmean")
        return F.mse_loss(m.decode(z), x) + 1e-3 * kl - 5e-4 * (1 + log_var - mean.pow(2) - log_var.exp()).mean()

    layers = {"a": nn.Linear(WIDTH, 48), "encode": nn.Linear(48, 32), "decode": nn.Linear(16, WIDTH)}
    return Function(loss, **layers), (vectors(),)


def contrastive() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        a, b = F.normalize(m.a(x), dim=-1), F.normalize(m.b(x.flip(1)), dim=-1)
        scores = a @ b.t() * m.scale.weight.exp().squeeze()
        target = torch.arange(x.shape[0])
        anchors = F.triplet_margin_loss(a, b, b.roll(1, 0)) + F.cosine_embedding_loss(a, b, torch.ones(x.shape[0]))
        return F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target) + anchors

    layers = {"a": nn.Linear(WIDTH, 16), "b": nn.Linear(WIDTH, 16), "scale": nn.Embedding(1, 1)}
    return Function(loss, **layers), (vectors(),)


def under_autocast() -> Made:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = F.relu(m.a(x))
            h = m.norm(h + m.b(h))
            scores = m.head(h)
        return F.cross_entropy(scores.float(), y)

    layers = {"a": nn.Linear(WIDTH, 48), "b": nn.Linear(48, 48), "head": nn.Linear(48, CLASSES)}
    return Function(loss, norm=nn.LayerNorm(48), **layers), (vectors(), labels(BATCH * 8))


def normalizations_under_autocast() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for conv, norm in zip(m.convs, m.norms, strict=True):
                x = F.silu(norm(conv(x)))
            return m.head(m.last(x.mean((2, 3)))).float().pow(2).mean()

    convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
    norms = nn.ModuleList([nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
    return Function(loss, convs=convs, norms=norms, last=nn.LayerNorm(8), head=nn.Linear(8, 3)), (pictures(),)


def fourier() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.a(x), dim=1)
        y = torch.fft.irfft(spectrum * torch.complex(m.real.weight, m.imag.weight), n=STEPS, dim=1)
        return F.huber_loss(y, x) + spectrum.abs().mean()

    weights = {"real": nn.Embedding(STEPS // 2 + 1, WIDTH), "imag": nn.Embedding(STEPS // 2 + 1, WIDTH)}
    return Function(loss, a=nn.Linear(WIDTH, WIDTH), **weights), (rows(),)


def sparse_embedding() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        return m.a(m.embed(x)).pow(2).mean() + m.bag(x).mean()

    embed = nn.Embedding(50, WIDTH, sparse=True)
    return Function(loss, embed=embed, bag=nn.EmbeddingBag(50, 8, mode="sum"), a=nn.Linear(WIDTH, 8)), (tokens(),)


def linear_algebra() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        gram = y.transpose(1, 2) @ y / STEPS + torch.eye(8, dtype=x.dtype)
        factor = torch.linalg.cholesky(gram)
        solved = torch.linalg.solve_triangular(factor, y.transpose(1, 2), upper=False)
        return factor.diagonal(dim1=1, dim2=2).log().sum(-1).mean() + solved.pow(2).mean() + torch.linalg.norm(y)

    return Function(loss, a=nn.Linear(WIDTH, 8)), (rows(),)


def outer_products() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        pairs = torch.einsum("bti,btj->bij", y, y).flatten(1)
        bilinear = m.bilinear(y[:, 0], y[:, 1])
        kron = torch.kron(m.a.weight[:2, :4], m.a.weight[2:4, :4])
        return (
            pairs.norm(dim=1).mean()
            + bilinear.tanh().sum()
            + kron.sum()
            + torch.baddbmm(pairs.view(-1, 8, 8), y.mT, y).mean()
        )

    return Function(loss, a=nn.Linear(WIDTH, 8), bilinear=nn.Bilinear(8, 8, 4)), (rows(),)


def frozen_and_detached() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = m.teacher(x)
        student = m.student(x)
        return (
            F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
            + (student * student.detach().sign()).mean()
        )

    teacher = nn.Linear(WIDTH, 16).requires_grad_(False)
    return Function(
        loss, teacher=teacher, student=nn.Sequential(nn.Linear(WIDTH, 48), nn.PReLU(), nn.Linear(48, 16))
    ), (vectors(),)


def branches_in_python() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        outs = {"low": m.a(x), "high": None}
        if m.training and x.shape[1] > 8:
            outs["high"] = F.selu(m.b(x * 2))
        total = sum(value.pow(2).mean() for value in outs.values() if value is not None)
        return total + sum(p.abs().sum() for p in m.parameters()) * 1e-4

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (rows(),)


def many_activations() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        functions = (F.relu6, F.hardsigmoid, F.softsign, F.logsigmoid, F.tanhshrink, F.celu, F.hardtanh, F.softshrink)
        for function in functions:
            y = y + m.b(function(y))
        return torch.special.erf(y).mean() + torch.atan2(y, x + 3).mean() + y.sin().mul(x.cos()).mean()

    return Function(loss, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)), (rows(),)


def concatenated_growth() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        found = [x]
        for conv in m.convs:
            found.append(F.relu(conv(torch.cat(found, 1))))
        y = torch.cat(found[1:], 1)
        first, second = y.split(8, 1)[:2]
        return (first * second).mean() + F.adaptive_max_pool2d(y, 3).sum() / 50

    convs = nn.ModuleList(nn.Conv2d(3 + 8 * i, 8, 3, padding=1) for i in range(4))
    return Function(loss, convs=convs), (pictures(),)


def mixed_padding() -> Made:
    def loss(m: Any, x: Tensor) -> Tensor:
        y = F.pad(x, (1, 2, 2, 1), mode="reflect")
        y = m.a(y)
        y = F.pad(y, (1, 1, 1, 1), mode="replicate") + F.pad(y, (1, 1, 1, 1), value=0.5)
        y = torch.roll(y, (1, -2), (2, 3)).flip(2).rot90(1, (2, 3))
        return F.lp_pool2d(y, 2, 3).mean() + F.fractional_max_pool2d(y, 2, output_size=5).mean()

    return Function(loss, a=nn.Conv2d(3, 8, 3)), (pictures(),)


USER_MODELS: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        two_heads, u_net, pixel_shuffle, normalizations, channels_last, squeeze_and_excite, patches, pool_with_indices,
        grid_sample, spectral_and_weight_norm, conv_3d_and_1d, slices_assigned, views_of_views, in_place_chain,
        scatter_and_gather, index_put, sorted_and_cumulated, masks_and_where, lstm_stack, packed_gru, gru_cells,
        lstm_cells_with_reset, ctc, causal_attention, fused_attention, relative_positions, rotary, transformer_encoder,
        mixture_of_experts, tied_embeddings, one_layer_three_times, checkpointed, counted_buffer, custom_functions,
        functional_gradient, vector_quantized, variational, contrastive, under_autocast,
        normalizations_under_autocast, fourier, sparse_embedding,
        linear_algebra, outer_products, frozen_and_detached, branches_in_python, many_activations, concatenated_growth,
        mixed_padding,
    )
}  # fmt: skip
