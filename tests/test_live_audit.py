# SPDX-License-Identifier: Apache-2.0
"""The live audit finds each planted tensor by its path and nothing else, and leaves no trace in the process."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import random
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clusters import Cluster, Run, StockCluster
from planted.cases import PLANTED

import mindspeed_recovery
from mindspeed_recovery.core import reachable
from mindspeed_recovery.errors import RecoveryError
from mindspeed_recovery.frameworks import megatron_audit
from mindspeed_recovery.testing.simulator import UnsafeMemory

pytestmark = pytest.mark.timeout(180)

PATHS = {path for _, path in PLANTED.values()}
ON = "--enable-recovery-safe-globals"
WARN = ("--recovery-audit", "warn")  # the default, which the other tests switch off


def paths(package: str, **options: Any) -> list[str]:
    """What the audit finds in one package; the tests' own modules may hold tensors."""
    return [one.path for one in mindspeed_recovery.audit.live(**options) if re.split("[.:]", one.path)[0] == package]


@pytest.fixture
def planted(memory: UnsafeMemory) -> Iterator[ModuleType]:
    """`planted.state` as after a first step."""
    module = importlib.import_module("planted.state")
    memory.register_host(module.HOST_SCALE)
    module.fill("cpu")
    yield module
    del sys.modules["planted.state"]
    del sys.modules["planted"].state


# ---- what is found -------------------------------------------------------------------------------------------------------


def test_each_hiding_place_is_found_by_its_path(planted, memory):
    found = [one for one in mindspeed_recovery.audit.live(is_device=memory.is_device) if "planted" in one.path]
    assert [one.path for one in found] == sorted(PATHS)
    by_path = {one.path: one for one in found}
    assert by_path["planted.state:causal_mask.<cache>[0]"] == reachable.Untracked(
        "planted.state:causal_mask.<cache>[0]", "planted.state:causal_mask", (2, 2), "torch.float32", 16, "cpu"
    )
    assert by_path["planted.state:TRACKER['moe']['values']"].location == "planted.state:TRACKER"
    for kind, (location, path) in PLANTED.items():
        assert by_path[path].location.startswith(location), kind


def test_nothing_is_found_without_a_device(planted):
    assert paths("planted") == []


POLICIES = {"planted.state:causal_mask": "drop", "planted.state:TRACKER": "reset", "planted.state:LOSS": "reset"}


@pytest.mark.parametrize("forgotten", [set(), set(list(PLANTED)[::2]), set(list(PLANTED)[1::2])], ids=len)
def test_only_what_is_not_declared_is_found(plugin, planted, memory, forgotten):
    for kind, (location, _) in PLANTED.items():
        if kind not in forgotten:
            plugin.track(location, policy=POLICIES.get(location, "ignored"), name=kind.replace(" ", "-").strip("()"))
    plugin.enable(memory=memory, catalogues=[])
    assert paths("planted") == sorted(PLANTED[kind][1] for kind in forgotten)


def test_declarations_count_before_the_plugin_is_enabled(plugin, planted, memory):
    plugin.track("planted.state:LOSS", policy="reset")
    assert set(paths("planted", is_device=memory.is_device)) == PATHS - {"planted.state:LOSS"}


CONTAINERS = """
import collections, functools, itertools, types
import torch

def tensor():
    return torch.ones(3)

ORDERED = collections.OrderedDict(a=tensor())
DEFAULT = collections.defaultdict(list, {7: [tensor()]})
SET = {tensor()}
KEYS = {tensor(): 1}
READ_ONLY = types.MappingProxyType({"x": tensor()})
PARTIAL = functools.partial(print, tensor(), end=tensor())
ITERATOR = itertools.cycle([tensor()])
CHAIN = [itertools.repeat({"deep": (tensor(),)})]

class Slotted:
    __slots__ = ("inner", "unset")

SLOTTED = Slotted()
SLOTTED.inner = tensor()

class Tuple(tuple):
    pass

TUPLE = Tuple([0, tensor()])
TUPLE.extra = tensor()

class Bag(dict):
    pass

BAG = Bag(a=tensor())
BAG.b = tensor()

class Owner:
    def __init__(self):
        self.kept = tensor()
    @property
    def value(self):
        raise AssertionError
    @staticmethod
    @functools.lru_cache(maxsize=None)
    def cached(size):
        return {"mask": tensor()}

METHOD = Owner().__init__
Owner.cached(1)
Owner.cached(2)

def generate():
    inside = tensor()
    yield 1
    yield inside

GENERATOR = generate()
next(GENERATOR)

def local():
    class Local:
        table = [tensor()]
    return Local()

LOCAL = local()

def keyword(*, cache={"k": tensor()}):
    return cache

LEAF = torch.ones(3, requires_grad=True)
LEAF.grad = tensor()
LEAF.note = tensor()
setattr(Owner, "not a name", tensor())
WEAK = __import__("weakref").ref(LEAF)
BASE = torch.ones(4)
VIEW = BASE[1:]
EMPTY = torch.empty(0)
MAXIMUM = torch.max(torch.ones(2, 2), 0)
"""
INSIDE = {
    "ORDERED['a']",
    "DEFAULT[7][0]",
    "SET[0]",
    "KEYS.<key>[0]",
    "READ_ONLY['x']",
    "PARTIAL.args[0]",
    "PARTIAL.keywords['end']",
    "ITERATOR.<referent>[1][0]",
    "CHAIN[0].<referent>[1]['deep'][0]",
    "SLOTTED.inner",
    "TUPLE[1]",
    "TUPLE.extra",
    "BAG['a']",
    "BAG.b",
    "METHOD.__self__.kept",
    "Owner.cached.<cache>[0]['mask']",
    "Owner.cached.<cache>[1]['mask']",
    "GENERATOR.<referent>[0]",
    "LOCAL.__class__.table[0]",
    "keyword.<default>.cache['k']",
    "LEAF",
    "LEAF.grad",
    "LEAF.note",
    "Owner.__dict__['not a name']",
    "BASE",
    "MAXIMUM.values",  # made in C, and not tracked by the collector
    "MAXIMUM.indices",
}


def test_insides_of_every_kind_of_object_are_found(make_module, memory):
    make_module("hidden", CONTAINERS)
    found = {path.removeprefix("hidden:") for path in paths("hidden", is_device=memory.is_device)}
    # What the collector shows of these differs between versions of Python.
    varying = {path for path in INSIDE if "<referent>" in path}
    assert {path for path in found if "<referent>" not in path} == INSIDE - varying
    assert {path.split(".<")[0] for path in found if "<referent>" in path} == {
        path.split(".<")[0] for path in varying if sys.version_info >= (3, 11) or "GENERATOR" not in path
    }


# ---- whose is it ---------------------------------------------------------------------------------------------------------


def test_tensors_of_a_model_in_a_global_are_the_models(planted, memory):
    layer = planted.MODEL = planted.Layer("cpu")
    planted.VIEW = layer.weight.detach()[:1]
    layer(torch.ones(2)).sum().backward()
    planted.GRADIENTS = [layer.weight.grad]
    layer.plain = torch.ones(5)
    assert set(paths("planted", is_device=memory.is_device, owners={"model": [layer]})) == PATHS
    extra = set(paths("planted", is_device=memory.is_device)) - PATHS
    assert extra == {
        "planted.state:GRADIENTS[0]",
        "planted.state:MODEL._buffers['bias']",
        "planted.state:MODEL.plain",
        "planted.state:VIEW",
    }


def test_what_a_hook_on_the_model_reaches_is_not_the_models(make_module, memory):
    module = make_module("trainer", "class Trainer: pass")
    trainer = module.TRAINER = module.Trainer()
    trainer.average = torch.ones(2)
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *unused: trainer)
    assert paths("trainer", is_device=memory.is_device, owners={"model": model}) == ["trainer:TRAINER.average"]
    model.trainer = trainer
    assert paths("trainer", is_device=memory.is_device, owners={"model": model}) == []


@pytest.mark.parametrize("policy", ["reset", "ignored"])
def test_state_on_instances_is_tracked_wherever_the_instances_are(plugin, make_module, memory, policy):
    source = "class Meter:\n    def __init__(self):\n        self.total, self.other = torch.ones(2), torch.ones(3)\n"
    module = make_module("meters", source + "class Own(Meter): pass", torch=torch)
    module.ALL = [module.Meter(), module.Own()]
    plugin.track("meters:Meter.total", policy=policy, on="instances")
    plugin.enable(memory=memory, catalogues=[])
    assert paths("meters") == ["meters:ALL[0].other", "meters:ALL[1].other"]


def test_state_in_quarantine_is_passed_over(plugin, make_module, memory):
    module = make_module("queues", WAITING=[torch.ones(2)], OTHER=torch.ones(3))
    plugin.track("queues:WAITING", policy="reset", quarantine=True)
    session = plugin.enable(memory=memory, catalogues=[])
    session.begin_step(1)
    session.before_update(1)
    assert paths("queues") == ["queues:OTHER"]
    session.stop()
    session.clean()
    found = mindspeed_recovery.audit.live()
    assert "queues:OTHER" in [one.path for one in found]
    assert not [one.path for one in found if "WAITING" in one.path or "mindspeed_recovery" in one.path]
    session.before_rollback(1)
    session.after_rollback()
    assert len(module.WAITING) == 1


# ---- it changes nothing --------------------------------------------------------------------------------------------------

HOSTILE = """
import types
import torch

CALLED = []

def called(name):
    def method(*args, **kwargs):
        CALLED.append(name)
        raise RuntimeError(f"{name} was called")
    return method

NAMES = "getattr repr str eq hash len iter bool contains getitem call format sizeof dir index length_hint reduce_ex".split()
METHODS = {f"__{name}__": called(name) for name in NAMES}
META = types.new_class("Meta", (type,), {}, lambda body: body.update(METHODS | {"__getattribute__": called("meta")}))

def hostile(name, base, **more):
    lie = property(called("lie"))
    return type.__new__(META, name, (base,), {**METHODS, "__getattribute__": called("getattribute"), **more, "__class__": lie})

Object, Dict, List = (hostile(base.__name__.title(), base) for base in (object, dict, list))
Dictless = hostile("Dictless", object, __dict__=property(called("__dict__")))
OBJECT, DICT, LIST, DICTLESS = object.__new__(Object), dict.__new__(Dict), list.__new__(List), object.__new__(Dictless)
object.__setattr__(OBJECT, "inner", torch.ones(2))
dict.__setitem__(DICT, "a", torch.ones(3))
list.append(LIST, torch.ones(4))
object.__setattr__(DICTLESS, "inner", torch.ones(5))
type.__setattr__(Object, "shared", torch.ones(6))

class Lazy(types.ModuleType):
    __getattr__ = called("lazy module")
    __dir__ = called("lazy module")

LAZY = Lazy("hostile.lazy")
LAZY.there = torch.ones(7)
"""


def test_no_code_of_anything_is_called(make_module, memory, monkeypatch):
    module = make_module("hostile", HOSTILE)
    monkeypatch.setitem(sys.modules, "hostile.lazy", module.LAZY)
    monkeypatch.setitem(sys.modules, "hostile.object", module.OBJECT)  # as six and py put there
    before = set(sys.modules)
    with pytest.raises(RuntimeError, match="getattribute was called"):
        _ = module.OBJECT.inner
    module.CALLED.clear()
    found = paths("hostile", is_device=memory.is_device)
    assert module.CALLED == []
    assert set(sys.modules) == before
    assert {path.removesuffix("['inner']") for path in found} == {  # before Python 3.11 there is a dict in between
        "hostile:DICT['a']",
        "hostile:DICTLESS.<referent>[0]",
        "hostile:LIST[0]",
        "hostile.object:inner",
        "hostile:Object.shared",
        "hostile.lazy:there",
    }


def test_random_numbers_references_and_modules_stay(planted, memory):
    planted.LEAF = torch.ones(3, requires_grad=True)
    planted.LEAF.sum().backward()
    holders = [
        planted.LOSS,
        planted.TRACKER,
        planted.TRACKER["moe"]["values"],
        planted.Scaler,
        planted.HOOKS,
        planted.LEAF,
    ]

    def observe() -> tuple[Any, ...]:
        states = bytes(torch.get_rng_state().tolist()), random.getstate(), np.random.get_state()[1].tobytes()
        counts = [sys.getrefcount(holder) for holder in holders]
        values = [one.clone().tolist() for one in (planted.LOSS, planted.LEAF)]
        return states, counts, values, set(sys.modules), planted.causal_mask.cache_info(), torch.is_grad_enabled()

    before = observe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mindspeed_recovery.audit.live(is_device=memory.is_device)
    assert observe() == before
    assert {one.path for one in found} > PATHS


def test_nothing_is_kept_alive(make_module, memory):
    module = make_module("short", A=torch.ones(2), B=[torch.ones(3)])
    module.C = torch.ones(2, requires_grad=True)
    alive = [weakref.ref(module.A), weakref.ref(module.B[0]), weakref.ref(module.C)]
    found = mindspeed_recovery.audit.live(is_device=memory.is_device)
    assert {"short:A", "short:B[0]", "short:C"} <= {one.path for one in found}
    del module.A, module.B, module.C
    assert [ref() for ref in alive] == [None] * 3, "not even a cycle holds them"


def test_error_in_the_predicate_keeps_nothing_alive(make_module):
    module = make_module("short", A=torch.ones(2))
    alive = weakref.ref(module.A)
    with pytest.raises(ValueError):
        mindspeed_recovery.audit.live(is_device=lambda tensor: bool("".index("x")))
    del module.A
    gc.collect()
    assert alive() is None


def test_each_object_is_visited_once(make_module, monkeypatch):
    circle: list[Any] = []
    circle.append({"again": circle})
    make_module("circle", CIRCLE=circle)
    visits: Counter[int] = Counter()
    referents = gc.get_referents

    def count(value: Any) -> list[Any]:
        visits[id(value)] += 1
        return referents(value)

    monkeypatch.setattr(reachable, "gc", SimpleNamespace(get_referents=count))
    assert mindspeed_recovery.audit.live(is_device=lambda tensor: False) == []
    assert visits[id(circle)] == 1
    assert max(visits.values()) == 1
    assert len(visits) < 3 * len(gc.get_objects()), "functions, classes and containers, but no numbers and texts"


def test_importing_the_package_gives_the_audit_without_torch():
    import subprocess

    code = "import sys, mindspeed_recovery; mindspeed_recovery.audit.live; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "False"


# ---- in a job ------------------------------------------------------------------------------------------------------------


def finding(number: int) -> reachable.Untracked:
    return reachable.Untracked(f"pkg:A[{number}]", "pkg:A", (2,), "torch.float32", 8, "npu:0")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """``found(n)``: the audit finds n tensors, or raises an error; returns the list of its calls."""

    def find(result: int | Exception) -> list[int]:
        calls: list[int] = []

        def live(**options: Any) -> list[reachable.Untracked]:
            calls.append(1)
            if isinstance(result, Exception):
                raise result
            return [finding(number) for number in range(result)]

        monkeypatch.setattr(mindspeed_recovery.audit, "live", live)
        return calls

    return find


def run_steps(mode: str, count: int = 4) -> None:
    audit = megatron_audit.LiveAudit(mode, dict)
    for step in range(11, 11 + count):
        audit.after_step(step)


def test_warning_names_the_first_ones_and_the_remedy_once(found, caplog):
    calls = found(12)
    with caplog.at_level(logging.DEBUG, "mindspeed_recovery"):
        run_steps("warn")
    assert calls == [1]
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(
        "after step 12, 12 device tensors belong to no model, optimizer, data loader or tracked state:"
    )
    assert warning.count("  pkg:A[") == megatron_audit.MOST_LINES
    assert "pkg:A[9]: shape (2,), torch.float32, 8 bytes on npu:0; location pkg:A" in warning
    assert "pkg:A[10]" not in warning
    assert "and 2 more" in warning
    assert "--recovery-patches" in warning and "track()" in warning and '"ignored"' in warning
    assert sum("untracked: pkg:A[" in record.getMessage() for record in caplog.records) == 12


def test_error_ends_training_after_the_second_step(found):
    found(1)
    run_steps("error", 1)
    with pytest.raises(RecoveryError, match=r"(?s)after step 12, 1 device tensor belongs to no.*pkg:A\[0\]"):
        run_steps("error")
    found(0)
    run_steps("error")


def test_off_does_nothing(found):
    calls = found(1)
    run_steps("off")
    assert calls == []


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_bug_in_the_audit_is_one_warning(found, caplog, mode):
    calls = found(KeyError("x"))
    run_steps(mode)
    assert calls == [1]
    assert ["failed, training goes on: KeyError" in record.getMessage() for record in caplog.records] == [True]


# ---- on real jobs --------------------------------------------------------------------------------------------------------

TRACKED_BY_VERSION = {
    "0.12.1": {
        "moe-aux-loss-tracker": "megatron.core.parallel_state:_MOE_LAYER_WISE_LOGGING_TRACKER['z_loss']['values']",
        "moe-loss-scale": "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.main_loss_backward_scale",
    },
    "0.19.2": {
        "moe-aux-loss-tracker": "megatron.core.transformer.moe.moe_logging:_MOE_METRICS_TRACKER._metrics['z_loss'].values",
        "rotary-cache": "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward.<cache>[0]",
    },
}


@pytest.mark.parametrize("version", TRACKED_BY_VERSION)
def test_catalogue_leaves_nothing_of_the_example_untracked(cluster: Callable[[str], Cluster], tmp_path, version):
    states = TRACKED_BY_VERSION[version]
    options = {"prepare": "audited:after_step", "step": 2, "out": str(tmp_path / "found"), "forgotten": list(states)}
    run = cluster(version).run("ep2", ON, "--train-iters", "2", **options)
    assert run.ended_well, run.tail()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.rank{rank}").read_text())
        assert found.pop("") == []
        for name, path in states.items():
            assert path in found[name], "without its entry it is named"


def warnings_of(run: Run, rank: int) -> list[str]:
    return [
        line for line in run.log(rank).splitlines() if "to no model, optimizer" in line or "the audit of this" in line
    ]


@pytest.mark.parametrize("layout", ["overlap", pytest.param("bf16", marks=pytest.mark.full)])
def test_stock_loop_audits_itself_and_finds_nothing(stock: StockCluster, layout):
    run = stock.run(layout, ON, *WARN, prepare="audited:speak")
    assert run.ended_well, run.tail()
    for rank in (0, 1):
        assert run.log(rank).count("audit after step 2: 0 untracked device tensors") == 1
        assert warnings_of(run, rank) == []


def test_stock_loop_names_the_state_that_is_not_tracked(stock):
    run = stock.run("overlap", ON, *WARN, prepare="stock_server:leave_out", state="moe-aux-loss-tracker")
    assert run.ended_well, run.tail()
    for rank in (0, 1):
        assert len(warnings_of(run, rank)) == 1
        assert "moe_logging:_MOE_METRICS_TRACKER._metrics['load_balancing_loss'].values: shape (" in run.log(rank)
    quiet = stock.run(
        "overlap", ON, "--recovery-audit", "off", prepare="stock_server:leave_out", state="moe-aux-loss-tracker"
    )
    assert quiet.ended_well
    assert not warnings_of(quiet, 0)


def test_audit_that_is_to_fail_ends_the_job_on_every_rank(stock):
    run = stock.run(
        "overlap",
        ON,
        "--recovery-audit",
        "error",
        prepare="stock_server:leave_out",
        state="moe-aux-loss-tracker",
        timeout=60,
    )
    assert 0 not in run.codes and -9 not in run.codes, run.tail()
    assert "RecoveryError: after step 2" in run.log(0)
    assert "_MOE_METRICS_TRACKER._metrics" in run.log(0)
