"""The dense float64 truth that every other implementation is checked against.

Slow on purpose: Hessians are whole matrices from autograd, one backward pass per coordinate, and every
measure is its definition written out with loops. Nothing of the library is imported, so nothing can be wrong
in both places for the same reason.

Shapes used throughout. A layer with G groups is G parallel layers with d output rows and m input features
each (a plain layer has G = 1; a feature of a convolution is an input channel × a kernel position):

* `W`: (G, d, m), the weight;
* `H`: (G, d, m, d, m), the Hessian of the risk within each group, H[γ, s, t, s', t'] = ∂²E/∂W_γst ∂W_γs't';
* `hessian(...)`: (N, N), the Hessian of whole parameter tensors, cross-group terms included.
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Loss = Callable[[Tensor, Tensor], Tensor]
Risk = Callable[[nn.Module], Tensor]
OutputHessian = Callable[[Tensor, int], Tensor]


# Risks and Hessians


def mean_risk(x: Tensor, y: Tensor, loss: Loss) -> Risk:
    """The empirical risk E as a function of the model, over the whole data set at once.

    Args:
        x: All inputs, samples first.
        y: All targets.
        loss: A reducing loss such as `torch.nn.functional.cross_entropy`; its own reduction makes the mean.
    """

    def risk(model: nn.Module) -> Tensor:
        return loss(model(x), y)

    return risk


class _WrittenOut(TorchFunctionMode):
    """Two functions by their definitions, as torch's own have a wrong or no second derivative.

    `torch._weight_norm` is g times v over its length along all axes but one, or all; `hardsigmoid` is
    min(max(x + 3, 0), 6) / 6.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.hardsigmoid:
            return (args[0] + 3).clamp(0, 6) / 6
        if func is not torch._weight_norm:
            return func(*args, **(kwargs or {}))
        v, g, dim = args
        axes = [axis for axis in range(v.dim()) if axis != dim]
        return g * v / v.square().sum(axes, keepdim=dim >= 0).sqrt()


def hessian(model: nn.Module, risk: Risk, names: Sequence[str]) -> Tensor:
    """Dense Hessian of the risk with respect to the named parameters, flattened and concatenated in order.

    Args:
        model: A float64 model, in the mode in which it is to be measured.
        risk: Maps the model to a scalar.
        names: Parameter names, e.g. `["fc1.weight", "fc1.bias"]`. A tied parameter goes by any of its names.

    Returns:
        (N, N), N the number of coordinates of the named parameters.
    """
    parameters = _parameters(model, names)
    # Fused attention kernels have no second derivative, that of weight normalisation a wrong one.
    with sdpa_kernel(SDPBackend.MATH), _WrittenOut():
        gradients = torch.autograd.grad(risk(model), parameters, create_graph=True, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in gradients])
        rows = torch.zeros(len(gradient), len(gradient), dtype=torch.float64)
        if not gradient.requires_grad:  # the risk is affine in these parameters
            return rows
        for coordinate in range(len(gradient)):
            parts = torch.autograd.grad(
                gradient[coordinate], parameters, retain_graph=True, materialize_grads=True
            )
            rows[coordinate] = torch.cat([part.flatten() for part in parts])
    return rows


def total_trace(model: nn.Module, risk: Risk) -> float:
    """Tr H over all parameters, biases and norm scales included; a tied parameter counts once."""
    return sum(float(hessian(model, risk, [name]).trace()) for name, _ in model.named_parameters())


def output_hessian(y: Tensor, loss: Loss) -> OutputHessian:
    """∇²E with respect to the output f_i of one sample: a function (all outputs, i) → (F, F), F = numel(f_i).

    The share of the sample in the risk (1/n; w_{y_i}/Σw with class weights) is part of it.
    """

    def hessian_of_sample(outputs: Tensor, i: int) -> Tensor:
        def risk_of_output(f: Tensor) -> Tensor:
            replaced = torch.cat([outputs[:i], f.reshape(outputs[i : i + 1].shape), outputs[i + 1 :]])
            return loss(replaced, y)

        H = torch.autograd.functional.hessian(risk_of_output, outputs[i].flatten())
        assert isinstance(H, Tensor)
        return H

    return hessian_of_sample


def gauss_newton(model: nn.Module, x: Tensor, names: Sequence[str], loss_hessian: OutputHessian) -> Tensor:
    """Dense generalised Gauss-Newton matrix Σ_i J_iᵀ (∇²_{f_i} E) J_i with J_i = ∂f_i/∂θ.

    Args:
        model: A float64 model that treats samples independently.
        x: All inputs, samples first.
        names: Parameter names, as for `hessian`.
        loss_hessian: (all outputs, i) → ∇²_{f_i} E of shape (F, F), the sample's share of the risk included;
            `output_hessian` makes one.

    Returns:
        (N, N), N the number of coordinates of the named parameters.
    """
    parameters = _parameters(model, names)
    size = sum(parameter.numel() for parameter in parameters)
    G = torch.zeros(size, size, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        outputs = model(x).detach()
        for i in range(len(x)):
            f = model(x[i : i + 1]).flatten()
            J = torch.zeros(len(f), size, dtype=torch.float64)
            for k in range(len(f)):
                parts = torch.autograd.grad(f[k], parameters, retain_graph=True, materialize_grads=True)
                J[k] = torch.cat([part.flatten() for part in parts])
            G += J.T @ loss_hessian(outputs, i) @ J
    return G


def _parameters(model: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    parameters = [model.get_parameter(name) for name in names]
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.dtype != torch.float64:
            raise TypeError(f"Expected {name} in float64 but got {parameter.dtype}: call model.double().")
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ValueError(f"Expected each parameter once but got {list(names)}, in which one is named twice.")
    return parameters


# Layers as matrices


def weight_matrix(module: nn.Module) -> Tensor:
    """The weight as G parallel matrices, (G, d, m); columns of a convolution: channel × kernel position."""
    entries = matrix_entries(module)
    return module.get_parameter("weight").detach().flatten()[entries]


def matrix_entries(module: nn.Module) -> Tensor:
    """Which entry of the weight, counted flat, stands where in the G matrices: (G, d, m)."""
    if isinstance(module, nn.Linear):
        return torch.arange(module.weight.numel()).reshape(1, *module.weight.shape)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        rows = module.out_channels // module.groups
        return torch.arange(module.weight.numel()).reshape(module.groups, rows, -1)
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return _transposed_entries(module)
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":  # stored as (inputs, outputs)
        weight = module.get_parameter("weight")
        inputs, outputs = weight.shape
        return torch.tensor([[[t * outputs + s for t in range(inputs)] for s in range(outputs)]])
    raise TypeError(f"Expected Linear, Conv1d, Conv2d or Conv3d but got {type(module).__name__}.")


def _transposed_entries(module: nn.Module) -> Tensor:
    """A transposed convolution's weight is (inputs, outputs of a group, *kernel): one entry after another."""
    weight, groups = module.get_parameter("weight"), int(module.groups)  # type: ignore[arg-type]
    inputs, rows = weight.shape[0] // groups, weight.shape[1]
    taps = math.prod(weight.shape[2:])
    entries = torch.zeros(groups, rows, inputs * taps, dtype=torch.int64)
    for group in range(groups):
        for s in range(rows):
            for c in range(inputs):
                for tap in range(taps):
                    place = ((group * inputs + c) * rows + s) * taps + tap
                    entries[group, s, c * taps + tap] = place
    return entries


def layer_entries(model: nn.Module, name: str) -> tuple[str, Tensor]:
    """The parameter that a layer's weight is in, and which of its entries stands where: (G, d, m).

    ``attn.q``, ``attn.k`` and ``attn.v`` are the projections of an `nn.MultiheadAttention` called ``attn``.
    """
    owner, _, last = name.rpartition(".")
    attention = model.get_submodule(owner)
    if isinstance(attention, nn.MultiheadAttention) and last in ("q", "k", "v"):
        if attention.in_proj_weight is None:
            weight = attention.get_parameter(f"{last}_proj_weight")
            return f"{owner}.{last}_proj_weight", torch.arange(weight.numel()).reshape(1, *weight.shape)
        E = attention.embed_dim
        first = ("q", "k", "v").index(last) * E * E
        return f"{owner}.in_proj_weight", torch.arange(first, first + E * E).reshape(1, E, E)
    return f"{name}.weight", matrix_entries(model.get_submodule(name))


def layer_weight(model: nn.Module, name: str) -> Tensor:
    """The weight of a layer, as `layer_entries` lays it out."""
    parameter, entries = layer_entries(model, name)
    return model.get_parameter(parameter).detach().flatten()[entries]


def layer_gauss_newton(model: nn.Module, x: Tensor, name: str, loss_hessian: OutputHessian) -> Tensor:
    """The Gauss-Newton matrix of a layer's weight, entries in the order of the flattened matrices: (N, N)."""
    parameter, entries = layer_entries(model, name)
    flat = entries.flatten()
    return gauss_newton(model, x, [parameter], loss_hessian)[flat][:, flat]


def within_groups(full: Tensor, W: Tensor) -> Tensor:
    """The blocks of a layer's Hessian (N, N) that stay within a group: (G, d, m, d, m)."""
    full = full.reshape(*W.shape, *W.shape)
    return torch.stack([full[group, :, :, group] for group in range(len(W))])


def kernel_taps(module: nn.Module) -> int:
    """Kernel positions per input channel: 1 for Linear, k₁·k₂·… for a convolution."""
    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    return math.prod(module.kernel_size) if isinstance(module, kinds) else 1


def layer_hessian(model: nn.Module, risk: Risk, name: str) -> Tensor:
    """The Hessian with respect to the weight of the module `name`, within each group: (G, d, m, d, m)."""
    parameter, entries = layer_entries(model, name)
    flat = entries.flatten()
    return within_groups(hessian(model, risk, [parameter])[flat][:, flat], layer_weight(model, name))


def channel_inputs(model: nn.Module, x: Tensor, name: str) -> Tensor:
    """What enters the module `name`, one row per sample and position: (observations, input channels).

    Unpadded feature maps: every sample and pixel (or token) is one observation of all channels. A module that
    is called several times contributes the observations of all its calls.
    """
    owner, _, last = name.rpartition(".")
    if isinstance(model.get_submodule(owner), nn.MultiheadAttention):
        return _attention_inputs(model, x, owner, last)
    module = model.get_submodule(name)
    recorded = [args[0] for args, _ in _recorded_calls(model, x, module)]
    if isinstance(module, nn.Embedding):  # the indicators of tokens; padding is none
        tokens = torch.cat([entry.flatten() for entry in recorded])
        padding = -1 if module.padding_idx is None else module.padding_idx
        return torch.eye(module.num_embeddings).double()[tokens] * (tokens != padding)[:, None]
    if any(
        kind.__name__.startswith(("Conv1d", "Conv2d", "Conv3d", "ConvT")) for kind in type(module).__mro__
    ):
        recorded = [entry.movedim(1, -1) for entry in recorded]
    return torch.cat([entry.reshape(-1, entry.shape[-1]) for entry in recorded])


def _recorded_calls(model: nn.Module, x: Tensor, module: nn.Module) -> list[tuple[tuple, dict]]:
    """The arguments of all calls of a module in a forward pass."""
    recorded: list[tuple[tuple, dict]] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: recorded.append((args, kwargs)), with_kwargs=True
    )
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.remove()
    return recorded


def _attention_inputs(model: nn.Module, x: Tensor, owner: str, last: str) -> Tensor:
    """What enters a projection of attention: an argument; before ``out_proj`` what comes out without it."""
    attention = model.get_submodule(owner)
    found = []
    for args, kwargs in _recorded_calls(model, x, attention):
        if last == "out_proj":
            bare = copy.deepcopy(attention)
            E = bare.embed_dim
            with torch.no_grad():
                bare.out_proj.weight.copy_(torch.eye(E))  # type: ignore[operator]
                if bare.out_proj.bias is not None:
                    bare.out_proj.bias.zero_()  # type: ignore[operator]
                found.append(bare(*args, **kwargs)[0])
        else:
            found.append(args[("q", "k", "v").index(last)])
    return torch.cat([entry.reshape(-1, entry.shape[-1]) for entry in found])


# Measures


def diagonal(H: Tensor) -> Tensor:
    """∂²E/∂W_γst², shaped like the weight: (G, d, m)."""
    groups, d, m = H.shape[:3]
    values = torch.zeros(groups, d, m, dtype=H.dtype)
    for group in range(groups):
        for s in range(d):
            for t in range(m):
                values[group, s, t] = H[group, s, t, s, t]
    return values


def hessian_trace(H: Tensor) -> float:
    """Tr H_l, summed over groups."""
    return float(diagonal(H).sum())


def top_eigenvalue(H: Tensor) -> float:
    """λ_max(H), the largest signed eigenvalue.

    Args:
        H: (N, N), the Hessian of the whole weight tensor, cross-group terms included: what `hessian` returns.
    """
    return float(torch.linalg.eigvalsh((H + H.T) / 2)[-1])


def weight_norm(W: Tensor) -> float:
    """‖W‖²_F of the whole weight tensor (squared)."""
    return float((W**2).sum())


def layer_flatness(W: Tensor, H: Tensor) -> float:
    """κ^l = ‖W‖²_F λ_max(H_l), of the whole weight tensor; `H` is (N, N) as for `top_eigenvalue`."""
    return weight_norm(W) * top_eigenvalue(H)


def layer_flatness_trace(W: Tensor, H: Tensor) -> float:
    """κ_τ^l = ‖W‖²_F Tr H_l, of the whole weight tensor."""
    return weight_norm(W) * hessian_trace(H)


def neuron_flatness(W: Tensor, H: Tensor, taps: int = 1) -> Tensor:
    """ρ(c) = w(c)ᵀ H(w(c)) w(c) for each input channel c, w(c) its outgoing weights.

    Args:
        W: (G, d, m).
        H: (G, d, m, d, m).
        taps: Kernel positions per input channel; all of them, in all rows, are its outgoing weights.

    Returns:
        (G · m / taps,), in the order of the layer's input channels.
    """
    groups, _, m = W.shape
    values = []
    for group in range(groups):
        for c in range(m // taps):
            columns = slice(c * taps, (c + 1) * taps)
            w = W[group][:, columns]
            values.append(torch.einsum("st,stuv,uv->", w, H[group][:, columns][..., columns], w))
    return torch.stack(values)


def neuron_flatness_incoming(W: Tensor, H: Tensor) -> Tensor:
    """w_sᵀ H_{s,s} w_s for each output row s, in the order of the layer's output channels: (G · d,)."""
    groups, d, _ = W.shape
    return torch.stack([W[g, s] @ H[g, s, :, s] @ W[g, s] for g in range(groups) for s in range(d)])


def relative_flatness(W: Tensor, H: Tensor) -> float:
    """κ_Tr = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'} in each group, summed over groups."""
    groups, d, _ = W.shape
    total = 0.0
    for group in range(groups):
        for s in range(d):
            for other in range(d):
                inner = W[group, s] @ W[group, other]
                total += float(inner * H[group, s, :, other].trace())
    return total


def relative_flatness_normalized(W: Tensor, H: Tensor, V: Tensor, taps: int = 1) -> float:
    """κ_Tr of the layer rewritten to act on V⁻¹φ: weights W V, Hessian V⁻¹ H V⁻¹.

    Args:
        W: (G, d, m).
        H: (G, d, m, d, m).
        V: (G · m / taps,), the spread of each input channel; a channel with spread 0 leaves both factors.
        taps: Kernel positions per input channel, which share its spread.
    """
    total = 0.0
    for group, spread in enumerate(V.reshape(len(W), -1)):
        v = spread.repeat_interleave(taps)
        kept = v > 0
        v = v[kept]
        W_kept = W[group][:, kept]
        H_kept = H[group][:, kept][..., kept]
        H_rewritten = H_kept / v[None, :, None, None] / v[None, None, None, :]
        total += relative_flatness((W_kept * v).unsqueeze(0), H_rewritten.unsqueeze(0))
    return total


def whitened_metric(W: Tensor, C: Tensor, taps: int = 1) -> Tensor:
    """D = (W Ĉ Wᵀ) ⊗ Ĉ⁺ of every group, Ĉ = C ⊗ 1_taps: (G, d, m, d, m).

    Args:
        W: (G, d, m).
        C: (G, u, u), the second moment of the u = m / taps input channels of every group.
        taps: Kernel positions per input channel.
    """
    groups, d, m = W.shape
    D = torch.zeros(groups, d, m, d, m, dtype=W.dtype)
    for group in range(groups):
        wide = torch.kron(C[group], torch.eye(taps, dtype=C.dtype))
        inverse = torch.linalg.pinv(wide, hermitian=True, rtol=1e-12)
        D[group] = torch.einsum("ab,st->asbt", W[group] @ wide @ W[group].T, inverse)
    return D


def second_moment(phi: Tensor, groups: int = 1, weights: Tensor | None = None) -> Tensor:
    """C = Σ_i c_i φ_i φ_iᵀ / Σ_i c_i of the input channels of every group: (G, u, u).

    Args:
        phi: (observations, channels).
        groups: G, which share out the channels in order.
        weights: One per observation; all alike when None.
    """
    weights = torch.ones(len(phi), dtype=phi.dtype) if weights is None else weights
    parts = phi.reshape(len(phi), groups, -1)
    total = sum(
        weight * torch.einsum("gi,gj->gij", row, row) for row, weight in zip(parts, weights, strict=True)
    )
    assert isinstance(total, Tensor)
    return total / weights.sum()


def in_metric(D: Tensor, H: Tensor) -> Tensor:
    """All eigenvalues of D H of all groups, which are those of D^½ H D^½, in ascending order.

    Args:
        D: (G, d, m, d, m).
        H: (G, d, m, d, m).
    """
    values = []
    for metric, curvature in zip(D, H, strict=True):
        size = metric.shape[0] * metric.shape[1]
        moments, directions = torch.linalg.eigh(metric.reshape(size, size))
        root = directions * moments.clamp(min=0).sqrt()
        values.append(torch.linalg.eigvalsh(root.T @ curvature.reshape(size, size) @ root))
    return torch.cat(values).sort().values


def maximal_relative_flatness(W: Tensor, H: Tensor) -> float:
    """κ = Σ_s ‖w_s‖² λ_max(H_{s,s}) over the rows of all groups."""
    groups, d, _ = W.shape
    total = 0.0
    for group in range(groups):
        for s in range(d):
            total += float(W[group, s] @ W[group, s]) * top_eigenvalue(H[group, s, :, s])
    return total


def feature_spread(phi: Tensor, tolerance: float = 1e-6) -> Tensor:
    """The unit in which each feature is measured: its standard deviation, or |mean| where it does not vary.

    V_t = std_t if std_t > tolerance · rms_t, else |mean_t|; a feature that is always 0 gets 0, "drop it".

    Args:
        phi: (observations, features).
        tolerance: Relative to the root mean square, so that rescaling a feature cannot change its kind.
    """
    values = torch.zeros(phi.shape[1], dtype=phi.dtype)
    for t, feature in enumerate(phi.T):
        mean = feature.mean()
        std = ((feature - mean) ** 2).mean().sqrt()
        rms = (feature**2).mean().sqrt()
        values[t] = std if std > tolerance * rms else mean.abs()
    return values


# Walks in parameter space


def all_parameters(model: nn.Module) -> Tensor:
    """Every parameter, flattened and concatenated in order: θ."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """∂ℓ_i/∂θ for every sample, one backward pass each: (n, N)."""
    rows = []
    for i in range(len(x)):
        parts = torch.autograd.grad(
            loss(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()), materialize_grads=True
        )
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def trust_region_maximum(g: Tensor, H: Tensor, radius: float) -> float:
    """The maximum of ⟨g, v⟩ + ½ vᵀHv over ‖v‖ ≤ radius, H positive semidefinite.

    The maximum lies on the sphere at v = (μI − H)⁻¹ g, μ ≥ λ_max the number that makes its length the radius;
    where even μ = λ_max leaves it too short, the rest of the length goes along a top eigenvector.
    """
    values, vectors = torch.linalg.eigh(H)
    along = vectors.T @ g
    top = float(values[-1])

    def at(mu: float) -> Tensor:
        gaps = mu - values
        return torch.where(gaps.abs() > 1e-12 * max(top, 1.0), along / gaps, torch.zeros_like(along))

    low, high = top, top + float(g.norm()) / radius + 1e-300
    if float(at(low).norm()) <= radius and float(along[-1].abs()) < 1e-12:
        v = at(low)
        v[-1] = (radius**2 - v.square().sum()).clamp(min=0).sqrt()
    else:
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if float(at(middle).norm()) > radius else (low, middle)
        v = at(high)
    return float(along @ v + 0.5 * (values * v.square()).sum())
