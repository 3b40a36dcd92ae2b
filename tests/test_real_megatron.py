# SPDX-License-Identifier: Apache-2.0
"""The plugin on real Megatron objects in one process: what start-up accepts, adopts, refuses and leaves alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from clusters import ROOT

pytestmark = pytest.mark.timeout(120)

PREPARE = """
import logging, sys, types
import torch, torch.distributed as dist
from mindspeed_recovery.frameworks import megatron_cpu
megatron_cpu.install()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
import megatron.core.optimizer
import mindspeed_recovery
from mindspeed_recovery.testing.simulator import UnsafeMemory

def recover(session, step):
    session.stop(); session.clean(); session.before_rollback(step); return session.after_rollback()
"""


def run(megatron: Path, script: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": f"{megatron}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("version", ["0.12.1", "0.19.2"])
def test_a_model_without_moe_and_without_rotary_embedding_starts(megatron, version):
    run(
        megatron(version),
        """
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        with megatron_cpu.cpu_mode():
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
            model = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8,
                             position_embedding_type="learned_absolute")
        session = mindspeed_recovery.enable(roots={"model": model}, memory=UnsafeMemory())
        present = {s["name"]: s["places"] for s in mindspeed_recovery.states()}
        assert present["router-expert-bias"] == 0, present
        assert present["rotary-frequencies"] == 0, present
        assert present["rng-tracker"] == 1, present
        for step in (1, 2):
            session.begin_step(step); session.before_update(step)
        report = recover(session, 1)
        assert report.exact, report.failures
        """,
    )


def test_a_tracker_rebound_by_destroy_model_parallel_is_adopted_again(megatron):
    run(
        megatron("0.12.1"),
        """
        session = mindspeed_recovery.enable(memory=UnsafeMemory())
        tracked = type(parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER)
        assert tracked is not dict and issubclass(tracked, dict)
        parallel_state.destroy_model_parallel()
        assert type(parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER) is dict
        session.begin_step(1)
        tracker = parallel_state.get_moe_layer_wise_logging_tracker()
        assert type(tracker) is tracked
        tracker["load_balancing_loss"] = {"values": torch.ones(2), "reduce_group": None, "avg_group": None}
        session.stop(); session.clean()
        try:
            tracker["load_balancing_loss"]
        except mindspeed_recovery.QuarantineError as error:
            assert "moe-aux-loss-tracker" in str(error) and "_MOE_LAYER_WISE_LOGGING_TRACKER" in str(error), error
        else:
            raise AssertionError("no quarantine")
        session.before_rollback(0); session.after_rollback()
        assert parallel_state.get_moe_layer_wise_logging_tracker() is tracker
        assert tracker["load_balancing_loss"]["values"].tolist() == [0, 0]
        """,
    )


@pytest.mark.parametrize("version", ["0.12.1", "0.19.2"])
def test_a_tracker_imported_by_name_elsewhere_is_the_same_object_after_rollback(megatron, version):
    run(
        megatron(version),
        """
        other = types.ModuleType("other"); sys.modules["other"] = other
        other.tracker = MTPLossLoggingHelper.tracker
        session = mindspeed_recovery.enable(memory=UnsafeMemory())
        assert other.tracker is MTPLossLoggingHelper.tracker
        before = other.tracker
        before["loss_values" if "0.19" in megatron_version() else "values"] = torch.ones(1)
        recover(session, 0)
        assert other.tracker is before is MTPLossLoggingHelper.tracker
        """.replace("megatron_version()", "__import__('megatron.core').core.__version__"),
    )


def test_a_catalogue_that_does_not_fit_is_refused_with_entry_version_and_candidates(megatron):
    output = run(
        megatron("0.19.2"),
        """
        import pathlib, re, tempfile
        from mindspeed_recovery import catalogue
        text = catalogue.shipped()[0].read_text()
        file = pathlib.Path(tempfile.mkdtemp()) / "old.toml"
        file.write_text(text.replace("megatron.core.tensor_parallel.random:_CUDA_RNG_STATE_TRACKER.states_",
                                     "megatron.core.tensor_parallel.random:_CUDA_RNG_STATES_TRACKER.states_"))
        try:
            mindspeed_recovery.enable(catalogues=[file])
        except mindspeed_recovery.LocationError as error:
            print(error)
        else:
            raise AssertionError("accepted")
        assert not [c for c in vars(MTPLossLoggingHelper).values() if "Recovery" in type(c).__name__], "nothing is left adopted"
        """,
    )
    assert "rng-tracker" in output
    assert re.search(r"old\.toml:\d+, megatron-core 0\.19\.2", output)
    assert "candidates: _CUDA_RNG_STATE_TRACKER" in output


def test_a_dump_after_clean_has_the_whole_state_in_its_file(megatron, tmp_path):
    run(
        megatron("0.12.1"),
        f"""
        tracker = parallel_state.get_moe_layer_wise_logging_tracker()
        tracker["load_balancing_loss"] = {{"values": torch.ones(2), "reduce_group": None, "avg_group": None}}
        rng = tensor_parallel.get_cuda_rng_tracker()
        rng.add("model-parallel-rng", 7)
        session = mindspeed_recovery.enable(memory=UnsafeMemory())
        session.begin_step(1); session.before_update(1)
        session.stop(); session.clean()
        try:
            len(parallel_state.get_moe_layer_wise_logging_tracker())
        except mindspeed_recovery.QuarantineError:
            pass
        else:
            raise AssertionError("no quarantine")
        states = rng.get_states()  # what the dump itself reads is never in quarantine
        session.before_save()
        file = "{tmp_path}/dump.pt"
        torch.save({{"tracker": parallel_state.get_moe_layer_wise_logging_tracker(), "rng": states}}, file)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded["tracker"]) is dict
        assert loaded["tracker"]["load_balancing_loss"]["values"].tolist() == [1, 1]
        assert torch.equal(loaded["rng"]["model-parallel-rng"], states["model-parallel-rng"])
        """,
    )


ATTRIBUTES = """
def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "megatron", "tensorboard") or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if key in ("__warningregistry__", "__builtins__", "_FakeScriptObject_cls"):  # the last: torch fills it late
                continue
            found[name, key] = value
            if isinstance(value, type):
                found.update({(name, key, k): v for k, v in vars(value).items() if not k.startswith("__")})
    return found

def same(one, other):
    # A plain container that came back is another object with the same contents.
    return one is other or (type(one) is type(other) and type(one) in (dict, set, list) and one == other)

def changed(before, after):
    return sorted(str(key) for key in before if key in after and not same(before[key], after[key]))
"""


def test_importing_the_package_changes_nothing(megatron):
    environment = os.environ | {"PYTHONPATH": f"{megatron('0.12.1')}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    script = f"""
import sys, types, torch, torch.utils.tensorboard, tensorboard
import megatron.core.parallel_state, megatron.core.optimizer, megatron.core.tensor_parallel.random
import megatron.core.models.gpt, megatron.core.transformer.moe.moe_utils, megatron.core.transformer.multi_token_prediction
{ATTRIBUTES}
before = attributes()
import mindspeed_recovery
from mindspeed_recovery import api, catalogue, cli
catalogue.installed_states(catalogue.shipped()); mindspeed_recovery.states()
after = attributes()
assert not changed(before, after), changed(before, after)
assert before.keys() == after.keys(), before.keys() ^ after.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["0.12.1", "0.19.2"])
def test_disable_undoes_enable(megatron, version):
    run(
        megatron(version),
        ATTRIBUTES
        + """
import torch.utils.tensorboard
before = attributes()
session = mindspeed_recovery.enable(memory=UnsafeMemory())
adopted = type(MTPLossLoggingHelper.tracker)
assert adopted is not dict
session.begin_step(1)
mindspeed_recovery.disable()
assert type(MTPLossLoggingHelper.tracker) is dict
assert not changed(before, attributes()), changed(before, attributes())
""",
    )


@pytest.mark.parametrize("version", ["0.12.1", "0.15.3", "0.19.2"])
def test_a_loss_that_the_framework_counts_twice_is_counted_twice_with_the_plugin_too(megatron, version):
    output = run(
        megatron(version),
        """
        try:
            from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
            tracker = get_moe_metrics_tracker()
            save = tracker.record
            values = lambda: tracker._metrics["load_balancing_loss"].values
        except ImportError:
            from megatron.core.transformer.moe import moe_utils
            save = moe_utils.save_to_aux_losses_tracker
            home = getattr(moe_utils, "get_moe_layer_wise_logging_tracker", None)
            home = home or parallel_state.get_moe_layer_wise_logging_tracker
            values = lambda: home()["load_balancing_loss"]["values"]

        def recorded_twice():
            for _ in range(2):
                save("load_balancing_loss", torch.tensor(1.0), 1, 2)
            twice = values().tolist()
            values().zero_()
            return twice

        print(recorded_twice())
        session = mindspeed_recovery.enable(memory=UnsafeMemory())
        session.begin_step(1)
        print(recorded_twice())
        session.before_update(1)
        """,
    )
    assert output.splitlines() == ["[2.0, 0.0]"] * 2
