# SPDX-License-Identifier: Apache-2.0
"""MindSpeed's rules, one test each, and the plugin as one of its features; on stand-ins for MindSpeed and Megatron."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import itertools
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mindspeed_recovery
from mindspeed_recovery import frameworks
from mindspeed_recovery.errors import LocationError, StateError
from mindspeed_recovery.frameworks import megatron_flag
from mindspeed_recovery.frameworks.mindspeed import FEATURE, install_when_loaded

pytestmark = pytest.mark.timeout(60)

STAND_INS = Path(__file__).parent / "stand_ins"
PACKAGES = ("megatron", "mindspeed", "mindspeed_llm")
FLAG = f"--{FEATURE}"
LOOP = "megatron.training.training"
OWN_LOOP = "mindspeed_llm.training.training"
ADAPTORS = {"mindspeed": "mindspeed.megatron_adaptor", "llm": "mindspeed_llm"}


# ---- the stack, and what the plugin puts around it -----------------------------------------------------------------


class Stack:
    """The stand-ins, not imported yet. ``run(*flags)`` is the adaptor's import with that command line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def arguments(self, *flags: str) -> None:
        self._patch.setattr(sys, "argv", ["pretrain.py", *flags])

    def run(self, adaptor: str, *flags: str) -> Any:
        self.arguments(*flags)
        module = importlib.import_module(ADAPTORS[adaptor])
        return getattr(module, "megatron_adaptor", module)

    @property
    def patches(self) -> Any:
        return importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager

    @property
    def manager(self) -> Any:
        return importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager

    @property
    def feature(self) -> Any:
        return importlib.import_module("mindspeed.features_manager.feature").MindSpeedFeature

    def loop(self, name: str = LOOP) -> Any:
        return importlib.import_module(name)


def loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in PACKAGES]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    install_when_loaded()()  # importing the package has joined; each test joins by itself
    others = {name: sys.modules.pop(name) for name in loaded()}
    for folder in (STAND_INS, STAND_INS / "mindspeed_llm_features"):
        monkeypatch.syspath_prepend(str(folder))
    double: Any = ModuleType("mindspeed_recovery.frameworks.megatron_loop")
    double.install_when_loaded = lambda: None  # what a parsed flag does to a Megatron without MindSpeed
    double.uninstall = lambda: None
    double.follow_adaptor = lambda: lambda: None
    double.wrappers = lambda: {f"{LOOP}:train_step": recovery_wrapper}
    monkeypatch.setitem(sys.modules, double.__name__, double)
    monkeypatch.setattr(frameworks, "megatron_loop", double, raising=False)
    yield Stack(monkeypatch)
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(others)


def is_ours(function: Any) -> bool:
    while function is not None and not vars(function).get("ours"):
        function = vars(function).get("__wrapped__")
    return function is not None


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    if is_ours(function):
        return function

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return ["ours", *(result if isinstance(result, list) else [result])]

    vars(wrapped)["ours"] = True
    return wrapped


def recovery_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    return around(function)


def recovery_replacement(function: Callable[..., Any]) -> Callable[..., Any]:
    return around(function)


@pytest.fixture
def install(stack: Stack) -> Iterator[Callable[..., Callable[[], None]]]:
    """``install(*names)``: the plugin, around these functions of the loop."""
    undo: list[Callable[[], None]] = []

    def call(*names: str, factory: Any = recovery_wrapper) -> Callable[[], None]:
        targets = {name if ":" in name else f"{LOOP}:{name}": factory for name in names or ("train",)}
        undo.append(install_when_loaded(lambda: targets))
        return undo[-1]

    yield call
    for function in undo:
        function()


# ---- MindSpeed's rules ---------------------------------------------------------------------------------------------


def test_rule_importers_of_the_same_name_follow_a_patch_and_aliases_do_not(stack: Stack, make_module: Any) -> None:
    source = f"from {LOOP} import train\nfrom {LOOP} import train as alias"
    user = make_module("a_training_script", source)
    original = stack.loop().train
    stack.patches.register_patch(f"{LOOP}.train", recovery_wrapper)
    stack.patches.apply_patches()
    assert user.train is stack.loop().train is not original
    assert user.alias is original


def test_rule_data_can_be_patched(stack: Stack, make_module: Any) -> None:
    module, importer = (
        make_module("some_data", "SIZES = [1]"),
        make_module("some_importer", "from some_data import SIZES"),
    )
    stack.patches.register_patch("some_data.SIZES", [2])
    stack.patches.apply_patches()
    assert module.SIZES == importer.SIZES == [2]


def test_rule_a_second_replacement_raises_unless_forced(stack: Stack) -> None:
    stack.patches.register_patch(f"{LOOP}.train", lambda: "first")
    with pytest.raises(RuntimeError, match="the patch of train exist !"):
        stack.patches.register_patch(f"{LOOP}.train", lambda: "second")
    stack.patches.register_patch(f"{LOOP}.train", lambda: "third", force_patch=True)
    stack.patches.apply_patches()
    assert stack.loop().train() == "third"


def test_rule_only_the_name_tells_a_wrapper_from_a_replacement(stack: Stack) -> None:
    stack.patches.register_patch(f"{LOOP}.train", recovery_wrapper)
    stack.patches.register_patch(f"{LOOP}.train_step", recovery_replacement)
    stack.patches.apply_patches()
    assert stack.loop().train.__wrapped__.__name__ == "train"
    assert stack.loop().train_step is recovery_replacement


def test_rule_a_wrapper_is_put_around_the_replacement_whichever_is_registered_first(stack: Stack) -> None:
    stack.patches.register_patch(f"{LOOP}.train", recovery_wrapper)
    stack.patches.register_patch(f"{LOOP}.train", lambda: "replaced")
    stack.patches.apply_patches()
    assert stack.loop().train() == ["ours", "replaced"]


def test_rule_one_wrapper_is_registered_once(stack: Stack) -> None:
    for _ in range(2):
        stack.patches.register_patch(f"{LOOP}.train", recovery_wrapper)
    assert stack.patches.patches_info[f"{LOOP}.train"].wrappers == [recovery_wrapper]


def test_rule_an_unknown_attribute_is_made_without_a_word(stack: Stack) -> None:
    stack.patches.register_patch(f"{LOOP}.no_such_name", lambda: "made")
    stack.patches.apply_patches()
    assert stack.loop().no_such_name() == "made"


def test_rule_a_method_can_be_patched_but_not_made(stack: Stack, make_module: Any) -> None:
    module = make_module("some_classes", "class Optimizer:\n    def step(self):\n        return 'step'")
    stack.patches.register_patch("some_classes.Optimizer.step", recovery_wrapper)
    stack.patches.apply_patches()
    assert module.Optimizer().step() == ["ours", "step"]
    stack.patches.register_patch("some_classes.Optimizer.no_such_name", recovery_wrapper)
    with pytest.raises(RuntimeError, match="no exist no_such_name"):
        stack.patches.apply_patches()


def test_rule_remove_patches_forgets_wrappers_and_skips_modules_with_mindspeed_in_the_name(
    stack: Stack, make_module: Any
) -> None:
    source = f"from {LOOP} import train"
    followers = {name: make_module(name, source) for name in ("a_script", "my_mindspeed_script")}
    original = stack.loop().train
    stack.patches.register_patch(f"{LOOP}.train", recovery_wrapper)
    stack.patches.apply_patches()
    stack.patches.remove_patches()
    assert stack.loop().train is followers["a_script"].train is original
    assert is_ours(followers["my_mindspeed_script"].train)
    stack.patches.apply_patches()
    assert stack.loop().train is original


def test_rule_set_features_list_replaces_the_contents_so_that_an_earlier_append_is_lost(stack: Stack) -> None:
    importlib.import_module("mindspeed.features_manager")
    features = stack.manager.FEATURES_LIST
    features.append(stack.feature("mine"))
    importlib.import_module("mindspeed_llm.features_manager")
    assert stack.manager.FEATURES_LIST is features
    assert "mine" not in [feature.feature_name for feature in features]


def test_rule_the_adaptor_parses_the_command_line_at_import_and_takes_unknown_flags_as_they_come(stack: Stack) -> None:
    stack.run("mindspeed", "--bare", "--value", "1", "--noop-layers", "3")
    args = importlib.import_module("mindspeed.args_utils").get_mindspeed_args()
    assert (args.bare, args.value, args.noop_layers, args.optimization_level) == (True, "1", "3", 2)


def test_rule_megatrons_parser_refuses_unknown_flags(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.run("mindspeed", FLAG)
    with pytest.raises(SystemExit):
        importlib.import_module("megatron.training.arguments").parse_args()
    assert f"unrecognized arguments: {FLAG}" in capsys.readouterr().err


def test_rule_a_features_life(stack: Stack) -> None:
    seen: list[str] = []

    def phase(name: str) -> Callable[..., None]:
        return lambda self, *args: seen.append(f"{name}, Megatron {'loaded' if LOOP in sys.modules else 'not loaded'}")

    phases = ("register_args", "pre_register_patches", "register_patches", "pre_validate_args", "post_validate_args",
              "validate_args")  # fmt: skip
    spy = type("Spy", (stack.feature,), {name: phase(name) for name in phases})("spy", optimization_level=0)
    stack.manager.FEATURES_LIST.append(spy)
    stack.run("mindspeed")
    importlib.import_module(LOOP)
    arguments = importlib.import_module("megatron.training.arguments")
    arguments.validate_args(arguments.parse_args())
    assert [line.split(",")[0] for line in seen] == [
        "register_args", "pre_register_patches", "register_patches",  # at the adaptor's import
        "register_args", "pre_validate_args", "post_validate_args", "validate_args",  # in Megatron
    ]  # fmt: skip
    assert seen[1] == "pre_register_patches, Megatron not loaded"


@pytest.mark.parametrize(
    ("level", "allowed", "value", "applies"),
    [(2, 2, True, True), (2, 2, False, False), (2, 1, True, False), (0, 0, None, True), (1, 2, "3", True)],
)
def test_rule_a_feature_applies_by_level_and_by_the_argument_of_its_name(
    stack: Stack, level: int, allowed: int, value: Any, applies: bool
) -> None:
    feature = stack.feature("Some-Feature ", optimization_level=level)
    args = argparse.Namespace(optimization_level=allowed, some_feature=value)
    assert bool(feature.is_need_apply(args)) is applies


def test_rule_repatch_builds_every_function_anew_and_drops_what_was_set_by_hand(stack: Stack) -> None:
    adaptor = stack.run("llm")
    loop = stack.loop()
    loop.train = around(loop.train)
    adaptor.repatch({})
    assert not is_ours(loop.train)


# ---- the flag ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_the_flag_is_known_to_mindspeed_and_to_megatron(stack: Stack, install: Any, adaptor: str) -> None:
    install()
    stack.run(adaptor, FLAG)
    args = importlib.import_module("megatron.training.arguments").parse_args()
    assert args.enable_recovery_safe_globals is True


def test_the_flag_group_is_in_the_help_once(stack: Stack, install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    stack.run("llm", FLAG)
    stack.arguments("--help")
    with pytest.raises(SystemExit):
        importlib.import_module("megatron.training.arguments").parse_args(megatron_flag.add_recovery_arguments)
    assert capsys.readouterr().out.count(f"\n  {FLAG}") == 1


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_without_the_flag_nothing_is_patched(stack: Stack, adaptor: str) -> None:
    undo = install_when_loaded(lambda: pytest.fail("asked for its wrappers"))
    try:
        stack.run(adaptor)
        assert not is_ours(stack.loop().train)
        assert f"{LOOP}.train_step" not in stack.patches.patches_info
    finally:
        undo()


# ---- the loop ------------------------------------------------------------------------------------------------------


def test_mindspeeds_loop_is_wrapped(stack: Stack, install: Any) -> None:
    install()
    stack.run("mindspeed", FLAG)
    assert stack.loop().pretrain() == ["ours", "train", "step", "all layers"]


def test_mindspeed_llms_own_loop_is_wrapped_once_under_either_name(stack: Stack, install: Any) -> None:
    install("train", "train_step", "training_log")
    stack.run("llm", FLAG)
    own = ["ours", "own train", "ours", "step", ["ours", "own log"]]
    assert stack.loop(OWN_LOOP).pretrain() == own
    assert stack.loop().pretrain() == own


@pytest.mark.parametrize("order", list(itertools.permutations(["plugin", "megatron", "adaptor"])))
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_any_order_of_imports_wraps_once(stack: Stack, install: Any, adaptor: str, order: tuple[str, ...]) -> None:
    stack.arguments(FLAG)
    steps = {"plugin": install, "megatron": stack.loop, "adaptor": lambda: stack.run(adaptor, FLAG)}
    for name in order:
        steps[name]()
    assert stack.loop().pretrain().count("ours") == 1
    if adaptor == "llm":
        assert stack.loop(OWN_LOOP).pretrain().count("ours") == 1


def test_after_the_adaptor_and_without_the_flag_nothing_is_patched(stack: Stack, install: Any) -> None:
    stack.run("llm")
    install()
    assert not is_ours(stack.loop().train)
    assert not is_ours(stack.loop(OWN_LOOP).train)


def test_it_is_on_at_every_optimization_level(stack: Stack, install: Any) -> None:
    install()
    stack.run("mindspeed", FLAG, "--optimization-level", "0")
    assert is_ours(stack.loop().train)


def test_replacing_the_list_of_features_keeps_it(stack: Stack, install: Any) -> None:
    install()
    stack.run("mindspeed")
    for features in ([], [stack.feature("other", 0)], list(stack.manager.FEATURES_LIST)):
        stack.manager.set_features_list(features)
        names = [feature.feature_name for feature in stack.manager.FEATURES_LIST]
        assert names.count("enable_recovery_safe_globals") == 1


def test_a_second_installation_changes_nothing(stack: Stack, install: Any) -> None:
    first, second = install(), install()
    stack.run("llm", FLAG)
    third = install()
    assert first == second == third
    assert stack.loop(OWN_LOOP).pretrain().count("ours") == 1


def test_registering_its_patches_a_second_time_wraps_once(stack: Stack, install: Any) -> None:
    install()
    stack.run("mindspeed", FLAG)
    stack.manager.apply_features_patches(importlib.import_module("mindspeed.args_utils").get_mindspeed_args())
    assert stack.loop().pretrain().count("ours") == 1


@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_it_survives_repatch(stack: Stack, install: Any, adaptor: str) -> None:
    install("train", "train_step")
    module = stack.run(adaptor, FLAG)
    before = stack.loop().pretrain()
    for _ in range(2):
        module.repatch({"noop_layers": "1"})
        assert [line.replace("without no-op layers", "all layers") for line in stack.loop().pretrain()] == before


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_what_a_parsed_flag_has_wrapped_before_is_not_taken_for_the_original(
    stack: Stack, install: Any, monkeypatch: pytest.MonkeyPatch, adaptor: str, late: bool
) -> None:
    plain: list[tuple[str, Any]] = []

    def wrap() -> None:
        for name in ("train", "train_step"):
            plain.append((name, getattr(stack.loop(), name)))
            setattr(stack.loop(), name, around(getattr(stack.loop(), name)))

    def unwrap() -> None:
        while plain:
            setattr(stack.loop(), *plain.pop())

    def plug() -> None:
        wrap()
        install("train", "train_step")

    monkeypatch.setattr(sys.modules["mindspeed_recovery.frameworks.megatron_loop"], "uninstall", unwrap)
    if not late:
        plug()
    module = stack.run(adaptor, FLAG)
    if late:
        plug()
    loop = stack.loop(OWN_LOOP if adaptor == "llm" else LOOP)
    assert loop.pretrain().count("ours") == 2
    module.repatch({"enable_recovery_safe_globals": False})
    assert "ours" not in loop.pretrain()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_repatch_switches_it_on_and_off(stack: Stack, install: Any, adaptor: str, late: bool) -> None:
    if not late:
        install("train", "train_step")
    module = stack.run(adaptor)
    loop = stack.loop(OWN_LOOP if adaptor == "llm" else LOOP)
    plain = loop.pretrain()
    if late:
        stack.arguments(FLAG)
        install("train", "train_step")
        assert loop.pretrain().count("ours") == 2
    for on in (False, True, True, False, True, False):
        module.repatch({"enable_recovery_safe_globals": on})
        assert loop.pretrain().count("ours") == (2 if on else 0)
    assert loop.pretrain() == plain


def test_removing_the_patches_takes_ours_along_everywhere(stack: Stack, install: Any) -> None:
    install("train", "train_step")
    stack.run("llm", FLAG)
    stack.manager.remove_patches()
    assert not any(is_ours(getattr(stack.loop(name), attribute))
                   for name in (LOOP, OWN_LOOP) for attribute in ("train", "train_step"))  # fmt: skip


@pytest.mark.parametrize("ours_first", [True, False])
def test_it_wraps_the_metric_that_the_no_op_layers_feature_replaces(
    stack: Stack, install: Any, ours_first: bool
) -> None:
    install("megatron.core.transformer.moe.moe_utils:track_moe_metrics")
    importlib.import_module("mindspeed.features_manager")
    if ours_first:
        stack.manager.FEATURES_LIST.reverse()
    stack.run("mindspeed", FLAG, "--noop-layers", "1")
    assert stack.loop().track_moe_metrics() == ["ours", "without no-op layers"]


def test_a_method_can_be_a_target(stack: Stack, install: Any, make_module: Any) -> None:
    module = make_module("some_classes", "class Optimizer:\n    def step(self):\n        return 'step'")
    undo = install("some_classes:Optimizer.step")
    stack.run("mindspeed", FLAG)
    assert module.Optimizer().step() == ["ours", "step"]
    undo()
    assert module.Optimizer().step() == "step"


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_name_that_the_module_lacks_is_an_error_with_candidates_and_is_not_made(stack: Stack, install: Any) -> None:
    install("train", "trainstep")
    with pytest.raises(
        LocationError, match=rf"{LOOP}:trainstep: .* has no attribute 'trainstep'; candidates: train_step"
    ):
        stack.run("mindspeed", FLAG)
    assert not hasattr(stack.loop(), "trainstep")
    assert f"{LOOP}.train" not in stack.patches.patches_info


def test_a_name_that_an_earlier_patch_has_made_is_an_error(stack: Stack, install: Any) -> None:
    install("no_such_name")
    stack.loop().no_such_name = None
    with pytest.raises(LocationError, match="no_such_name: a function to wrap was looked for, and None found"):
        stack.run("mindspeed", FLAG)


def test_a_factory_whose_name_would_make_it_a_replacement_is_refused(stack: Stack, install: Any) -> None:
    install(factory=recovery_replacement)
    with pytest.raises(
        StateError, match=f"{LOOP}.train: the factory 'recovery_replacement' would replace the function"
    ):
        stack.run("mindspeed", FLAG)
    assert stack.loop().train() == ["train", "step", "all layers"]


def test_a_stack_without_megatrons_loop_is_told_so_and_left_alone(
    stack: Stack, install: Any, make_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("no_such_package.training:train", "no_such_package.training:evaluate", "pretrain")
    stack.run("mindspeed", FLAG)
    assert [r.getMessage() for r in caplog.records] == [
        f"{FLAG}: no_such_package.training:{name} is not wrapped, there is no module 'no_such_package'"
        for name in ("train", "evaluate")
    ]
    assert is_ours(stack.loop().pretrain)


def test_an_import_that_fails_inside_the_target_is_not_taken_for_a_missing_one(
    stack: Stack, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_loop.py").write_text("import no_such_package_of_its_own")
    monkeypatch.syspath_prepend(str(tmp_path))
    install("broken_loop:train")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_its_own"):
        stack.run("mindspeed", FLAG)


def test_a_mindspeed_without_a_list_of_features_is_told_so_and_left_alone(
    stack: Stack, install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = importlib.import_module("mindspeed.features_manager.features_manager")
    del module.MindSpeedFeaturesManager.FEATURES_LIST
    with caplog.at_level(logging.WARNING, "mindspeed_recovery"):
        install()
    (record,) = caplog.records
    assert "is not one that the plugin can join" in record.getMessage()
    assert "FEATURES_LIST" in record.getMessage()
    assert not hasattr(module.MindSpeedFeaturesManager.set_features_list, "__wrapped__")


# ---- the inverse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("adaptor", ADAPTORS)
def test_the_inverse_leaves_mindspeed_as_it_would_be_without_the_plugin(
    stack: Stack, install: Any, adaptor: str, late: bool
) -> None:
    importlib.import_module("mindspeed.features_manager")
    before = dict(vars(stack.manager))
    if late:
        module = stack.run(adaptor, FLAG, "--noop-layers", "1")
        undo = install("train", "train_step")
    else:
        undo = install("train", "train_step")
        module = stack.run(adaptor, FLAG, "--noop-layers", "1")
    assert stack.loop().pretrain().count("ours") == 2
    undo()
    undo()
    assert dict(vars(stack.manager)) == before
    assert not any(isinstance(f, stack.feature) and f.feature_name == "enable_recovery_safe_globals"
                   for f in stack.manager.FEATURES_LIST)  # fmt: skip
    loop = stack.loop(OWN_LOOP if adaptor == "llm" else LOOP)
    assert "ours" not in loop.pretrain()
    assert stack.loop().track_moe_metrics() == "without no-op layers"
    module.repatch({"enable_recovery_safe_globals": True})
    assert "ours" not in loop.pretrain()


def test_after_the_inverse_a_later_import_of_mindspeed_is_not_joined(stack: Stack, install: Any) -> None:
    install()()
    stack.run("mindspeed", FLAG)
    assert not is_ours(stack.loop().train)


def test_it_can_be_installed_again(stack: Stack, install: Any) -> None:
    stack.run("llm", FLAG)
    install()()
    install()
    assert stack.loop(OWN_LOOP).pretrain().count("ours") == 1


# ---- what it must not do -------------------------------------------------------------------------------------------


def test_installing_imports_no_upstream() -> None:
    code = (
        "import sys; from mindspeed_recovery.frameworks.mindspeed import install_when_loaded; install_when_loaded(); "
        "print(sorted({'torch', 'megatron', 'mindspeed', 'mindspeed_llm'} & {n.split('.')[0] for n in sys.modules}))"
    )
    root = STAND_INS.parent.parent
    path = {"PYTHONPATH": ":".join(map(str, (STAND_INS, STAND_INS / "mindspeed_llm_features", root))), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env=path)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_module_of_ours_binds_a_name_of_megatron() -> None:
    """The package's name has "mindspeed" in it: patches would be applied to such a name, and never be removed."""

    def names(path: Path) -> Iterator[str]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                yield f"{path.name}: from {node.module} import {', '.join(alias.name for alias in node.names)}"

    package = Path(mindspeed_recovery.__file__).parent
    assert [line for path in package.rglob("*.py") for line in names(path)] == []


def test_the_default_wrappers_are_those_of_the_stock_loop(stack: Stack) -> None:
    undo = install_when_loaded()
    try:
        stack.run("mindspeed", FLAG)
        assert is_ours(stack.loop().train_step)
    finally:
        undo()


def test_the_stock_loops_factories_keep_the_rules() -> None:
    from mindspeed_recovery.frameworks import megatron_loop

    factories = megatron_loop.wrappers()
    assert (
        megatron_loop.wrappers() == factories
    )  # the very same objects, or MindSpeed would take them for other wrappers
    for location, factory in factories.items():
        assert location.split(":")[0] in (LOOP, "megatron.training.checkpointing")
        assert factory.__name__.startswith("recovery_"), "MindSpeed removes wrappers by name"
        assert factory.__name__.endswith("wrapper")
        once = factory(recovery_replacement)
        assert factory(once) is once is not recovery_replacement
