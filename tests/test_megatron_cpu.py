# SPDX-License-Identifier: Apache-2.0
"""megatron-core on a CPU: what install() changes, that uninstall() puts it back, and that real layers then train."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("wrapt")

from mindspeed_recovery.frameworks import megatron_cpu  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def installed() -> Iterator[None]:
    megatron_cpu.install()
    yield
    megatron_cpu.uninstall()


def attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of the objects that install() may touch, by owner and name."""
    owners = [torch, torch.cuda, torch.cuda.random, torch.random, torch.Tensor, torch.distributed]
    owners += [sys.modules[name] for name in megatron_cpu._MEGATRON if name in sys.modules]
    norm = getattr(sys.modules.get("megatron.core.transformer.torch_norm"), "WrappedTorchNorm", None)
    owners += [norm] if norm is not None else []
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    missing = object()
    return {key for key in before.keys() | after.keys() if before.get(key, missing) is not after.get(key, missing)}


def test_uninstall_restores_every_attribute() -> None:
    before, filters = attributes(), list(megatron_cpu._rng_logger.filters)
    megatron_cpu.install()
    try:
        assert ("torch.cuda", "current_device") in changed(before, attributes())
    finally:
        megatron_cpu.uninstall()
    assert changed(before, attributes()) == set()
    assert megatron_cpu._rng_logger.filters == filters
    assert megatron_cpu._kernel_finder not in sys.meta_path


def test_a_second_install_or_uninstall_does_nothing() -> None:
    megatron_cpu.uninstall()
    before = attributes()
    megatron_cpu.install()
    try:
        once, finders = attributes(), list(sys.meta_path)
        megatron_cpu.install()
        assert changed(once, attributes()) == set()
        assert sys.meta_path == finders
    finally:
        megatron_cpu.uninstall()
    megatron_cpu.uninstall()
    assert changed(before, attributes()) == set()


def test_install_refuses_a_process_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = attributes()
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        megatron_cpu.install()
    assert changed(before, attributes()) == set()


def test_cuda_means_cpu_inside_the_mode_only() -> None:
    with megatron_cpu.cpu_mode():
        for device in ("cuda", "cuda:0", torch.device("cuda", 0)):
            assert torch.zeros(2, device=device).device.type == "cpu"
            assert torch.zeros(2).to(device).device.type == "cpu"
        tensor = torch.zeros(2)
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type() == "torch.FloatTensor"


def test_the_mode_nests() -> None:
    with megatron_cpu.cpu_mode():
        with megatron_cpu.cpu_mode():
            assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"


def test_the_mode_belongs_to_its_thread() -> None:
    names: list[str] = []

    def name() -> None:
        names.append(torch.zeros(1).type())

    def name_in_mode() -> None:
        with megatron_cpu.cpu_mode():
            name()

    with megatron_cpu.cpu_mode():
        for target in (name, name_in_mode):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert names == ["torch.FloatTensor", "torch.cuda.FloatTensor"]


def test_the_device_generator_is_the_cpu_generator(installed: None) -> None:
    torch.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


def test_triton_is_stubbed_for_the_kernel_modules_alone(
    installed: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("a real triton is used as it is")
    (tmp_path / "stubbed_kernels.py").write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(size: tl.constexpr):\n    return 1\n"
    )
    (tmp_path / "outer_kernels.py").write_text("import triton\nfrom stubbed_kernels import kernel\n")
    (tmp_path / "other_kernels.py").write_text("import triton\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(megatron_cpu._KernelFinder, "modules", ("stubbed_kernels", "outer_kernels"))
    assert importlib.import_module("outer_kernels").kernel(0) == 1
    assert "triton" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="triton"):
        importlib.import_module("other_kernels")
    for name in ("outer_kernels", "stubbed_kernels"):
        del sys.modules[name]


def test_megatron_is_changed_whatever_the_import_order_and_restored(caplog: pytest.LogCaptureFixture) -> None:
    megatron_cpu.install()  # this Megatron may not be importable without it
    try:
        pytest.importorskip("megatron.core")
        for name in megatron_cpu._MEGATRON:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        during = attributes()
    finally:
        megatron_cpu.uninstall()
    restored = attributes()
    random = sys.modules["megatron.core.tensor_parallel.random"]
    assert random._set_cuda_rng_state.__module__ == random.__name__
    assert ("megatron.core.tensor_parallel.random", "_set_cuda_rng_state") in changed(during, restored)
    megatron_cpu.install()  # now after the import
    try:
        assert {key for key, _ in changed(restored, attributes())} == {key for key, _ in changed(during, restored)}
        tracker = random.CudaRNGStatesTracker()
        tracker.add("dropout", 3)
        with caplog.at_level(logging.WARNING), tracker.fork("dropout"):
            torch.rand(1)
        assert not caplog.records
    finally:
        megatron_cpu.uninstall()
    assert changed(restored, attributes()) == set()


TRAIN_ONE_STEP = """
import sys
from mindspeed_recovery.frameworks import megatron_cpu
megatron_cpu.install()
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
assert "triton" not in sys.modules

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
with megatron_cpu.cpu_mode():
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall", add_bias_linear=False, use_cpu_initialization=True,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )
    model = GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), vocab_size=32,
                     max_sequence_length=8, position_embedding_type="rope")
    tokens = torch.arange(16).reshape(2, 8)
    loss = model(tokens, torch.arange(8).expand(2, 8), None, labels=tokens).mean()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
torch.distributed.destroy_process_group()
print("trained", float(loss))
"""


def test_a_real_moe_model_runs_forward_and_backward(tmp_path: Any) -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron.core is not installed")
    run = subprocess.run(
        [sys.executable, "-c", TRAIN_ONE_STEP, str(tmp_path / "store")],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    assert "trained" in run.stdout
