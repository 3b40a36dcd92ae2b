# SPDX-License-Identifier: Apache-2.0
"""What a call or an annotation by its name alone says about device state: the vocabulary of torch and of its device packages.

Only names of torch are known here, and the shape of names in general; no framework's.
"""

from __future__ import annotations

import re
import sys
from enum import Enum


class Holds(str, Enum):
    """What a value is, or has in it."""

    TENSOR = "tensor"
    PARAMETER = "parameter"
    HANDLE = "handle"
    """A stream, event, graph, memory pool, process group, or the handle of a running transfer."""
    RNG = "random state"

    def __str__(self) -> str:
        return self.value


def named(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


HIGH, MEDIUM, LOW = 3, 2, 1
CONFIDENCE = {HIGH: "high", MEDIUM: "medium", LOW: "low"}

FACTORIES = named(
    "arange as_tensor asarray blackman_window empty empty_strided eye full hann_window linspace logspace ones rand randint "
    "randn randperm range scalar_tensor sparse_coo_tensor tensor tril_indices triu_indices zeros"
)
"""Functions of torch that make a tensor on the device that they are told, else on the host."""

_TYPES = named(
    "Tensor FloatTensor HalfTensor BFloat16Tensor DoubleTensor IntTensor LongTensor ShortTensor ByteTensor CharTensor "
    "BoolTensor"
)
_NO_TENSOR = named(
    "Size allclose can_cast compile device dtype enable_grad equal finfo iinfo inference_mode initial_seed is_tensor jit load "
    "manual_seed no_grad numel promote_types result_type save script seed typename vmap cond while_loop layout "
    "memory_format use_deterministic_algorithms autocast einsum_path broadcast_shapes are_deterministic_algorithms_enabled "
    "from_numpy frombuffer from_file Generator Stream Event SymInt SymFloat SymBool Storage UntypedStorage"
)
_OPERATIONS = ("torch.nn.functional.", "torch.linalg.", "torch.special.", "torch.fft.", "torch.ops.", "torch.sparse.")
_DEVICES = ("cuda", "npu", "xpu", "musa", "mlu", "hpu", "accelerator")
_HANDLES = named(
    "Stream Event ExternalStream CUDAGraph NPUGraph XPUGraph MemPool graph_pool_handle current_stream default_stream "
    "stream"
)
_GROUPS = named(
    "new_group new_subgroups new_subgroups_by_enumeration split_group init_device_mesh ProcessGroup ProcessGroupGloo "
    "ProcessGroupNCCL ProcessGroupHCCL DeviceMesh isend irecv batch_isend_irecv"
)
_HANDLE_TYPES = named("Stream Event CUDAGraph NPUGraph ProcessGroup Work MemPool DeviceMesh")
_RNG_METHODS = named("get_rng_state get_rng_state_all default_generator")
_HANDLE_METHODS = named("Stream ExternalStream CUDAGraph NPUGraph MemPool current_stream default_stream")
_RNG = named("get_rng_state get_rng_state_all default_generators Generator fork_rng")
_PARAMETERS = named("Parameter UninitializedParameter Buffer")
_LAYERS = named(
    "Linear Bilinear Embedding EmbeddingBag LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm "
    "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d MultiheadAttention Transformer LSTM GRU RNN "
    "TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer DistributedDataParallel "
    "FullyShardedDataParallel"
)
HOST_PACKAGES = frozenset(sys.stdlib_module_names) | {
    "numpy", "pandas", "scipy", "PIL", "yaml", "tqdm", "packaging", "omegaconf", "hydra", "wandb", "tensorboard",
    "transformers", "tokenizers", "datasets", "requests", "pytest", "matplotlib", "regex", "sklearn", "pybind11",
    "sentencepiece", "einops_exts", "psutil", "logging", "rich", "nltk", "tiktoken", "triton", "setuptools",
}  # fmt: skip
"""Packages whose calls do not answer with device tensors, or of whose answers nothing is known."""

DTYPES = ("float", "bfloat", "int", "uint", "half", "double", "long", "bool")
"""How the names of torch's types begin."""

HOST_ATTRIBUTES = named(
    "shape dtype device ndim is_cuda is_npu is_cpu layout requires_grad is_leaf itemsize nbytes names __name__ __class__ "
    "__dict__ __doc__ is_sparse is_meta is_quantized"
)
"""Attributes of a tensor that are no tensors."""
TENSOR_ATTRIBUTES = named("data grad T mT H real imag main_grad grad_data param_data")
"""Attributes that are tensors again: of a tensor."""
ONLY_TENSOR_ATTRIBUTES = named("grad_fn is_cuda is_npu requires_grad main_grad")
"""Attributes that only tensors have: reading one says what the value is."""

HOST_METHODS = named(
    "item tolist cpu numpy size dim numel nelement element_size data_ptr get_device stride storage_offset is_contiguous "
    "untyped_storage storage is_floating_point is_complex pin_memory format join split_lines startswith endswith strip lower "
    "upper replace encode decode keys index isoformat total_seconds mean_time state_dict backward register_hook "
    "register_post_accumulate_grad_hook is_pinned is_shared count dim_order has_names"
)
"""Methods whose answer is no device tensor, whatever they are called on."""
TENSOR_METHODS = named(
    "detach clone contiguous cuda npu xpu new_zeros new_ones new_empty new_full new_tensor expand_as view_as type_as "
    "masked_fill masked_select index_select index_add index_copy scatter_add scatter_reduce unsqueeze bfloat16 log_softmax "
    "logsumexp repeat_interleave bmm masked_scatter addmm"
)
"""Methods that only tensors have, and whose answer is one."""
SURE_METHODS = named(
    "detach contiguous new_zeros new_ones new_empty new_full new_tensor expand_as view_as type_as masked_fill masked_select "
    "index_select index_add index_copy scatter_add unsqueeze log_softmax logsumexp repeat_interleave bmm data_ptr "
    "untyped_storage record_stream element_size is_contiguous copy_ zero_ fill_ add_ sub_ mul_ div_ lerp_ "
    "addcmul_ addcdiv_ masked_fill_ scatter_ scatter_add_ index_add_ index_copy_ clamp_ normal_ uniform_ detach_"
)
"""Methods that no other object is likely to have: calling one says what the value is."""
VIEW_METHODS = named(
    "to view reshape float half double int long bool short byte char type sum mean max min abs exp log pow norm repeat t any "
    "all split unbind sort topk flip roll round neg sub add mul div unique nonzero eq ne lt gt le ge logical_and logical_or "
    "logical_not floor ceil prod std var dequantize to_local full_tensor redistribute gather scatter permute transpose "
    "softmax argmax argmin argsort cumsum cumprod matmul triu tril unfold narrow expand chunk squeeze flatten clamp "
    "clamp_min clamp_max sigmoid tanh relu rsqrt sqrt mm dot outer index_put index_fill tile movedim swapaxes"
)
"""Methods of tensors whose answer is a tensor, where they are called on one."""
ITEM_METHODS = named("values items get pop popleft popitem get_nowait setdefault __getitem__ peek copy get_group")
"""Methods whose answer is, or holds, a part of what they are called on."""
MODULE_METHODS = named("parameters named_parameters buffers named_buffers modules named_modules children")
ONLY_MODULE_METHODS = MODULE_METHODS | named("state_dict load_state_dict train eval zero_grad")
"""Methods that a module, an optimizer or a model has, and no tensor or container of tensors."""
STORES = {
    "append": 0, "appendleft": 0, "extend": 0, "extendleft": 0, "add": 0, "insert": 1, "update": 0, "put": 0,
    "put_nowait": 0, "setdefault": 1, "__setitem__": 1, "push": 0,
}  # fmt: skip
"""Methods that put an argument into what they are called on, and which argument."""
APPENDS = named("append appendleft extend extendleft insert add")
"""Those of lists and their like, whose elements are of one kind."""
PASSING = named(
    "list tuple dict set frozenset deque defaultdict OrderedDict sorted reversed iter next zip enumerate copy deepcopy "
    "chain cast partial partialmethod proxy ref from_iterable SimpleNamespace filter map max min sum abs namedtuple"
)
"""Functions whose answer holds their arguments."""
CONTAINERS = named(
    "dict list set deque defaultdict OrderedDict Queue SimpleQueue LifoQueue PriorityQueue WeakKeyDictionary "
    "WeakValueDictionary WeakSet Counter Namespace SimpleNamespace ChainMap UserDict UserList"
)
QUEUES = named("deque Queue SimpleQueue LifoQueue PriorityQueue")
CACHES = named("lru_cache cache cached")

_OPEN = re.compile(
    "tensor|param|object|generic|type|any|buffer|output|input|batch|dict|list|union|modules?$|models?$", re.IGNORECASE
)
_HOST = re.compile("(?:^|_)(?:cpu|host|pin|pinned|numpy)(?:_|$)", re.IGNORECASE)
_SCALARS = named(
    "int float bool str bytes complex dtype device Size Path PathLike Enum Number ndarray Namespace slice range "
    "Callable Type type"
)
_WRAPPERS = named(
    "Optional Union None List Dict Tuple Set Sequence Iterable Iterator Mapping MutableMapping Literal Final ClassVar list "
    "dict tuple set frozenset FrozenSet Collection Annotated Deque deque DefaultDict OrderedDict"
)


def denies(names: list[str]) -> str:
    """What an annotation of these names rules out: ``everything`` (numbers and texts), ``tensors`` (a handle, or an object
    of a class that is no tensor's), or nothing."""
    told = {name.rsplit(".", 1)[-1] for name in names} - _WRAPPERS
    if told and told <= _SCALARS:
        return "everything"
    return (
        "tensors"
        if told and all(name in _HANDLE_TYPES or name in _SCALARS or _is_object(name) for name in told)
        else ""
    )


def _is_object(name: str) -> bool:
    """Whether a name is likely to be that of a class whose objects are no tensors, and of no alias or type variable."""
    return len(name) > 3 and name.lstrip("_")[:1].isupper() and not name.isupper() and not _OPEN.search(name)


def is_host_name(name: str) -> bool:
    """Whether a name says that what it names is on the host."""
    return bool(_HOST.search(name))


Word = tuple[Holds, int, str]
"""What, how sure, and why."""


def annotation(name: str) -> Word | None:
    """What an annotation with this (dotted) name promises."""
    last = name.rsplit(".", 1)[-1]
    if last in _TYPES or last == "DTensor":
        return Holds.TENSOR, MEDIUM, f"annotated {name}"
    if last in _HANDLE_TYPES and ("." in name or last == "ProcessGroup"):
        return Holds.HANDLE, MEDIUM, f"annotated {name}"
    if last == "Generator" and name.startswith("torch."):
        return Holds.RNG, MEDIUM, f"annotated {name}"
    if last in _PARAMETERS:
        return Holds.PARAMETER, MEDIUM, f"annotated {name}"
    return None


def call(name: str, device: bool | None) -> Word | None:
    """What a call of a name of torch (``torch.…``, or of a device package) makes, apart from its arguments.

    ``device``: whether it is given a device that is not the host; None if it is given none.
    """
    first, _, rest = name.partition(".")
    last = name.rsplit(".", 1)[-1]
    if first != "torch":
        return (Holds.HANDLE, HIGH, f"{name}()") if first == "torch_npu" and last in _HANDLES else None
    part = rest.partition(".")[0]
    if part == "distributed":
        return (Holds.HANDLE, HIGH, f"{name}()") if last in _GROUPS else None
    if part in _DEVICES or rest in ("Stream", "Event"):
        if last in _HANDLES:
            return Holds.HANDLE, HIGH, f"{name}()"
        if last in _TYPES:
            return Holds.TENSOR, HIGH, f"{name}()"
        return (Holds.RNG, HIGH, f"{name}()") if last in _RNG else None
    if last in _RNG and part in ("get_rng_state", "random", "Generator"):
        return Holds.RNG, HIGH if device or last != "Generator" else MEDIUM, f"{name}()"
    if last in _PARAMETERS and part == "nn":
        return Holds.PARAMETER, MEDIUM, f"{name}()"
    if part == "nn" and last in _LAYERS:
        return Holds.PARAMETER, MEDIUM, f"{name}()"
    if rest in FACTORIES or rest in _TYPES:
        if device:
            return Holds.TENSOR, HIGH, f"{name}() on a device"
        return Holds.TENSOR, LOW, f"{name}() without a device"
    return None


def is_layer(name: str) -> bool:
    """Whether a call of this dotted name makes a layer, a container of layers or a parameter: a module registers it."""
    first, _, last = name.rpartition(".")
    return first.startswith("torch.nn") and last[:1].isupper()


def method(name: str) -> Word | None:
    """What a method of this name makes, whatever it is called on: a device package may be behind an object."""
    if name in _RNG_METHODS:
        return Holds.RNG, MEDIUM, f".{name}()"
    if name in _HANDLE_METHODS:
        return Holds.HANDLE, MEDIUM, f".{name}()"
    return None


def is_operation(name: str) -> bool:
    """Whether a name is an operation of torch whose result is a tensor where its arguments are."""
    if name.startswith(_OPERATIONS) or name == "torch.autograd.grad" or name == "torch.utils.checkpoint.checkpoint":
        return True
    first, _, rest = name.partition(".")
    return (
        first == "torch" and "." not in rest and rest not in FACTORIES and rest not in _NO_TENSOR and rest[:1].islower()
    ) and not rest.startswith(("is_", "get_", "set_", "_"))


def is_external(name: str) -> bool:
    """Whether a call of this dotted name answers with device tensors if it is given some: a device package's operation."""
    return name.partition(".")[0] not in HOST_PACKAGES and not name.startswith("torch.")
