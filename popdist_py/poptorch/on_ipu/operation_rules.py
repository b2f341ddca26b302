"""Tables and functions that describe torch's operations for estimates of memory and time.

The tables give the kind of each operation of torch, and the tensors that the backward pass of the
operation reads. The functions of the module ``operation_rules`` compute the sizes of matrix
products. An operation of torch that is not in the tables counts as elementwise. The backward pass
of an operation that is not in the tables is assumed to read the operation's inputs. The names of
operations in the tables do not include the overload (as in ``add`` for ``add.Tensor``). For an
in-place operation (such as ``add_``), the tables contain the name without the final ``_`` (such as
``add``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import torch

from popdist_py.ipu.graph import Kind, Product, Type
from popdist_py.poptorch.tracing.recorded_operations import Observation, Seen

__all__ = [
    "ATTENTIONS",
    "COPIES",
    "FILLS",
    "RANDOM",
    "RECURRENT",
    "TYPES",
    "Multiplied",
    "Rule",
    "Saves",
    "attention_products",
    "given",
    "is_cast",
    "multiplied",
    "per_sample",
    "rule_of",
]

# The tensors that the backward pass of an operation reads. The word "others" means that the
# gradient of each operand depends on all other operands of the operation. The word "index" means
# that the backward pass reads all inputs of the operation except the first. The word "both" means
# that the backward pass reads the inputs and the output of the operation.
Saves: TypeAlias = Literal["nothing", "inputs", "output", "both", "others", "index"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The properties of an operation that determine its memory and time on an IPU.

    Attributes:
        kind: The kind of the operation, such as "norm" (a normalisation). The kind of an operation
            selects the formulas for its memory and time.
        saves: A word (such as "inputs") for the tensors that the backward pass of the operation
            reads.
    """

    kind: Kind
    saves: Saves


_KINDS: Final[Mapping[Rule, str]] = MappingProxyType(
    {
        Rule("product", "others"): "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear "
        "convolution _convolution mkldnn_convolution _trilinear",
        Rule("norm", "inputs"): "native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training _batch_norm_with_update cudnn_batch_norm "
        "batch_norm_with_update native_layer_norm native_group_norm _fused_rms_norm rms_norm",
        Rule("softmax", "output"): "_softmax _log_softmax _safe_softmax",
        Rule("pool", "both"): "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
        "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d",
        Rule("pool", "nothing"): "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d",
        Rule("lookup", "inputs"): "embedding _embedding_bag _embedding_bag_forward_only",
        Rule("lookup", "index"): "gather index_select index take",
        Rule("loss", "inputs"): "nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss "
        "huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
        "multi_margin_loss multilabel_margin_loss_forward _ctc_loss",
        Rule("add", "nothing"): "add sub rsub",
        Rule("elementwise", "others"): "mul div addcmul lerp",
        Rule("elementwise", "index"): "where masked_fill scatter index_put index_add index_fill "
        "scatter_add scatter_reduce masked_select",
        Rule("elementwise", "output"): "relu sigmoid tanh exp sqrt rsqrt reciprocal threshold "
        "leaky_relu elu expm1 hardtanh cumprod",
        Rule("elementwise", "nothing"): "mean sum neg cat stack copy clone _to_copy "
        "constant_pad_nd flip roll repeat cumsum upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d "
        "upsample_trilinear3d _upsample_bilinear2d_aa reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle "
        "im2col col2im round floor ceil sign trunc argmax argmin eq ne lt le gt ge logical_and "
        "logical_or logical_not bitwise_not bitwise_and bitwise_or isnan isinf isfinite any all "
        "fill zero tril triu slice_scatter select_scatter select_backward slice_backward split "
        "unbind chunk channel_shuffle native_channel_shuffle native_dropout one_hot "
        "_local_scalar_dense diag",
    }
)  # fmt: skip
_RULES: Final = MappingProxyType(
    {name: rule for rule, names in _KINDS.items() for name in names.split()}
)
_UNKNOWN: Final = Rule("elementwise", "inputs")

# The operations of torch that copy a tensor to new memory.
COPIES: Final = frozenset({"clone", "_to_copy", "lift_fresh", "contiguous", "copy", "_copy_from"})
# The in-place operations of torch that overwrite a tensor without reading its old values.
FILLS: Final = frozenset({"copy_", "fill_", "zero_"})
RANDOM: Final = frozenset(
    {
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"),
        *("bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "random_", "multinomial"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_", "poisson", "native_dropout"),
    }
)
# The functions of torch that run a recurrent layer. The module ``operations_to_steps`` converts all
# operations of a call of a recurrent layer together.
RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
ATTENTIONS: Final = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "scaled_dot_product_attention",
    }
)
# The element type that the IPU uses for each element type of torch.
TYPES: Final[Mapping[torch.dtype, Type]] = MappingProxyType(
    {
        torch.float64: "float32",
        torch.float32: "float32",
        torch.bfloat16: "float32",
        torch.float16: "float16",
        torch.int64: "int32",
        torch.int32: "int32",
        torch.int16: "int16",
        torch.int8: "int8",
        torch.uint8: "uint8",
        torch.bool: "bool",
    }
)


def rule_of(operator: str) -> Rule:
    """Return the properties of a torch operation that determine its memory and time on an IPU."""
    return _RULES.get(operator) or _RULES.get(operator.removesuffix("_"), _UNKNOWN)


def per_sample(total: int, batch: int) -> int:
    """Return ``total`` divided by the number of samples, rounded up, and at least 1."""
    return max(1, -(-total // batch))


@dataclass(frozen=True, slots=True)
class Multiplied:
    """The two operands and the sizes of a matrix product or convolution.

    Attributes:
        first: The operand of the matrix product whose rows belong to the samples of the
            micro-batch.
        second: The other operand of the matrix product, which contains weights or activations.
        product: The sizes of the matrix product or convolution for one sample.
    """

    first: Seen
    second: Seen
    product: Product


def multiplied(
    operator: str, arguments: tuple[Any, ...], output: Seen, *, batch: int, weight_first: bool
) -> Multiplied | None:
    """Return the operands and sizes of a matrix product or convolution.

    The function ``multiplied`` returns None if the arguments of the operation are not supported.

    Args:
        operator: The name of the operation in torch, without its overload.
        arguments: The positional arguments of the operation.
        output: The tensor that the operation returns.
        batch: The number of samples of the micro-batch.
        weight_first: Whether the first operand is a weight and the second operand is not. All
            samples of a micro-batch are multiplied by the same weight.
    """
    if "convolution" in operator:
        return _convolved(arguments, output, batch)
    tensors = [value for value in arguments if isinstance(value, Seen)]
    first, second = tensors[-2:] if operator != "linear" else tensors[:2]
    columns = second.shape[-1] if len(second.shape) > 1 else 1
    if operator == "linear":
        columns = second.shape[0]
    depth = first.shape[-1] if first.shape else 1
    if operator == "_trilinear" or not depth:
        return None
    count = first.shape[0] if len(first.shape) == 3 and operator != "linear" else 1
    rows = prod(first.shape) // (depth * count)
    if weight_first:
        first, second, rows, columns = second, first, columns, rows
    if count > 1 and count % batch == 0 and not weight_first:
        return Multiplied(first, second, Product(rows, depth, columns, count // batch))
    return Multiplied(first, second, Product(per_sample(rows, batch), depth, columns, count))


def _convolved(arguments: tuple[Any, ...], output: Seen, batch: int) -> Multiplied | None:
    image, kernel = arguments[:2]
    if len(arguments) < 9 or not isinstance(kernel, Seen):
        return None
    transposed, groups = bool(arguments[6]), int(arguments[8])
    positions = prod(kernel.shape[2:])
    if transposed:
        rows = image.shape[0] * prod(image.shape[2:])
        depth, columns = kernel.shape[0] // groups, kernel.shape[1] * positions
    else:
        rows = output.shape[0] * prod(output.shape[2:])
        depth, columns = kernel.shape[1] * positions, kernel.shape[0] // groups
    product = Product(per_sample(rows, batch), depth, columns, groups, is_convolution=True)
    return Multiplied(image, kernel, product)


def attention_products(query: Seen, value: Seen, batch: int) -> tuple[Product, Product]:
    """Return the sizes of the two matrix products in scaled dot product attention.

    The first matrix product computes the attention scores from queries and keys. The second matrix
    product multiplies the attention scores (after the softmax) by the tensor of attention values.

    Args:
        query: The tensor Q of the attention (queries Q, keys K, values V), with the shape [...,
            length, depth]. The first dimensions of the queries include the attention heads.
        value: The tensor V of the attention, with the shape [..., other length, value depth].
        batch: The number of samples of the micro-batch.
    """
    length, depth = query.shape[-2:]
    other, width = value.shape[-2:]
    count = per_sample(prod(query.shape[:-2]), batch)
    return Product(length, depth, other, count), Product(length, other, width, count)


def given(operations: Sequence[Observation]) -> list[Seen]:
    """Return the tensors that the given operations read, without the tensors that they compute."""
    made: set[int] = set()
    given: list[Seen] = []
    for seen in operations:
        given += [tensor for tensor in seen.inputs if tensor.storage not in made]
        known = {tensor.storage for tensor in seen.inputs}
        made |= {output.storage for output in seen.outputs} - known
    return given


def is_cast(seen: Observation) -> bool:
    """Tell whether an operation converts a float16 tensor to float32.

    The emulation inserts conversions from float16 into the torch functions that the emulation runs
    in float32.
    """
    if seen.operator != "_to_copy" or not seen.inputs:
        return False
    return seen.inputs[0].dtype == torch.float16 and seen.outputs[0].dtype == torch.float32
