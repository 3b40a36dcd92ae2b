# SPDX-License-Identifier: Apache-2.0
"""MindSpeed and MindSpeed-LLM: the plugin as one more MindSpeed feature.

MindSpeed builds every patched function anew, out of the original and of what its features have registered, whenever it
applies its patches (at the import of its adaptor, and in ``repatch()``). So what wraps Megatron's training loop is
registered with its patch manager, by a feature that its list of features always contains. There is no entry point for
that: post-import hooks are used, and nothing of MindSpeed is imported here.

What MindSpeed does is written down in ``tests/test_mindspeed.py``, one test a rule.
"""

from __future__ import annotations

import importlib
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import wrapt

from mindspeed_recovery.core.location import Location
from mindspeed_recovery.errors import LocationError, StateError

logger = logging.getLogger("mindspeed_recovery")

Factory = Callable[[Callable[..., Any]], Callable[..., Any]]
Wrappers = Callable[[], Mapping[str, Factory]]

FEATURE = "enable-recovery-safe-globals"

_FEATURE_MODULE = "mindspeed.features_manager.feature"
_MANAGER_MODULE = "mindspeed.features_manager.features_manager"
_PATCH_MODULE = "mindspeed.patch_utils"
_LOOP = "megatron.training.training"
_OWN_LOOP = (
    "mindspeed_llm.training.training"  # MindSpeed-LLM trains with its own copies of some of the loop's functions
)

_installation: _Installation | None = None


def install_when_loaded(wrappers: Wrappers | None = None) -> Callable[[], None]:
    """Join MindSpeed's features as soon as its manager is loaded, or at once if it is. Returns the inverse.

    ``wrappers`` gives what is put around which function of the framework: a location (``megatron.training.training:train``)
    and a factory, called with the function that stands there; by default those of the stock Megatron loop. It is called
    when patches are registered, which happens only if the flag is given. A factory is the same object each time, has a
    name that ends in ``wrapper``, and returns a function that it has wrapped before as it is.

    A second call changes nothing. Where MindSpeed has applied its patches already, ours are applied on top. A MindSpeed
    without a list of features is left alone, with a WARNING. Importing thread only.
    """
    global _installation
    if _installation is None:
        _installation = _Installation(wrappers or _loop_wrappers)
        wrapt.register_post_import_hook(_installation.on_import, _MANAGER_MODULE)
    return _installation.undo


def _loop_wrappers() -> Mapping[str, Factory]:
    from mindspeed_recovery.frameworks import megatron_loop

    leave = megatron_loop.follow_adaptor()
    if _installation is not None:
        _installation.undo_too(leave)
    return megatron_loop.wrappers()


class _Installation:
    """What was changed in MindSpeed, and how it is taken back."""

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._registered: dict[str, Factory] = {}
        self._own: list[tuple[str, Any, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._active = True

    def on_import(self, module: ModuleType) -> None:
        if not self._active:  # wrapt keeps its hooks for the life of the process
            return
        try:
            manager = module.MindSpeedFeaturesManager
            features = manager.FEATURES_LIST
            base = sys.modules[_FEATURE_MODULE].MindSpeedFeature
            patches = sys.modules[_PATCH_MODULE].MindSpeedPatchesManager
            set_features = vars(manager)["set_features_list"]
        except (AttributeError, KeyError) as error:
            logger.warning(
                "this MindSpeed is not one that the plugin can join (looked for MindSpeedFeaturesManager.FEATURES_LIST and "
                "set_features_list in %s, MindSpeedFeature in %s, MindSpeedPatchesManager in %s; not found: %s); use a "
                "MindSpeed for Megatron-core 0.12 or later",
                _MANAGER_MODULE, _FEATURE_MODULE, _PATCH_MODULE, error,
            )  # fmt: skip
            return
        feature = _make_feature(base, self._register)

        def join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            self._join(manager.FEATURES_LIST, feature)
            return result

        def leave(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            finals = list(self._finals(patches))
            result = wrapped(*args, **kwargs)
            # It leaves modules with "mindspeed" in their names as they are: MindSpeed-LLM's loop would keep our wrappers
            # after a repatch() that switches the plugin off.
            for name, final, original in finals:
                _rebind(name, final, original, where="mindspeed")
            self._unwrap_own()
            self._registered.clear()
            return result

        self._replace(manager, "set_features_list", wrapt.FunctionWrapper(set_features, join))
        if "remove_patches" in vars(manager):
            self._replace(manager, "remove_patches", wrapt.FunctionWrapper(vars(manager)["remove_patches"], leave))
        self._join(features, feature)
        self._undo.append(lambda: self._part(manager.FEATURES_LIST, feature))
        self._undo.append(lambda: self._unwrap(patches))
        if any(patch.is_applied for patch in patches.patches_info.values()):
            self._catch_up(patches, feature)

    def undo(self) -> None:
        """Take everything back: the feature leaves the list, and no function is wrapped by us any more. Idempotent.

        A MindSpeed without ``remove_patches`` (2.1.0) has no way back: functions that it has patched stay wrapped.
        """
        global _installation
        self._active = False
        while self._undo:
            self._undo.pop()()
        if _installation is self:
            _installation = None

    def undo_too(self, undo: Callable[[], None]) -> None:
        """Have one more thing taken back by `undo`."""
        if undo not in self._undo:
            self._undo.append(undo)

    def _replace(self, manager: Any, name: str, value: Any) -> None:
        original = vars(manager)[name]
        setattr(manager, name, value)
        self._undo.append(lambda: setattr(manager, name, original))

    @staticmethod
    def _join(features: list[Any], feature: Any) -> None:
        if all(other.feature_name != feature.feature_name for other in features):
            features.append(feature)  # last, so that its wrappers stand outside those of the others

    @staticmethod
    def _part(features: list[Any], feature: Any) -> None:
        features[:] = [other for other in features if other is not feature]

    def _register(self, patches: Any) -> None:
        """Check every target before the first one is registered: the patch manager makes a name that it does not find."""
        factories = {Location.parse(text): factory for text, factory in self._wrappers().items()}
        wanted = {location: factory for location, factory in factories.items() if _holds_function(location)}
        for location, factory in wanted.items():
            if not factory.__name__.endswith("wrapper"):
                raise StateError(
                    f"{location}: the factory '{factory.__name__}' would replace the function: MindSpeed takes only one "
                    "whose name ends in 'wrapper' for a decorator"
                )
        if not self._registered:
            _end_plain_route(list(wanted))
        for location, factory in wanted.items():
            target = f"{location.module}.{'.'.join(location.path)}"
            patches.register_patch(target, factory)
            self._registered[target] = factory
            if location.module == _LOOP:
                self._wrap_own(location.path[0], factory)

    def _wrap_own(self, name: str, factory: Factory) -> None:
        # Not through the patch manager: it never takes a wrapper off there, and MindSpeed-LLM gives it this very function as
        # the replacement of Megatron's.
        own = vars(sys.modules[_OWN_LOOP]).get(name) if _OWN_LOOP in sys.modules else None
        if getattr(own, "__module__", None) == _OWN_LOOP:
            wrapped = factory(own)  # type: ignore[arg-type]
            if wrapped is not own:
                self._own.append((name, own, wrapped))
                _rebind(name, own, wrapped, where="mindspeed")

    def _unwrap_own(self) -> None:
        while self._own:
            name, own, wrapped = self._own.pop()
            _rebind(name, wrapped, own, where="mindspeed")

    def _catch_up(self, patches: Any, feature: Any) -> None:
        # The adaptor has parsed the command line at its import and does not do so again.
        args = Namespace(**{feature.feature_name: f"--{FEATURE}" in sys.argv[1:]})
        if feature.is_need_apply(args):
            feature.register_patches(patches, args)
            for target in self._registered:
                patches.patches_info[target].apply_patch()

    def _finals(self, patches: Any) -> Iterator[tuple[str, Any, Any]]:
        for target, factory in self._registered.items():
            patch = patches.patches_info[target]
            if patch.is_applied and factory in patch.wrappers:
                yield target.rpartition(".")[2], patch.final_patch_func, patch.orig_func

    def _unwrap(self, patches: Any) -> None:
        self._unwrap_own()
        for target, factory in self._registered.items():
            patch = patches.patches_info[target]
            if factory not in patch.wrappers:
                continue  # removed by the patch manager itself
            patches.remove_wrappers(target, factory.__name__)
            patch.is_applied = False  # it is built again, without ours
            patch.apply_patch()
        self._registered.clear()


def _make_feature(base: Any, register: Callable[[Any], None]) -> Any:
    """A feature of MindSpeed's own class, which exists only once MindSpeed is loaded."""

    class RecoveryFeature(base):
        """``args.enable_recovery_safe_globals`` switches it on, at every ``--optimization-level``."""

        def __init__(self) -> None:
            super().__init__(FEATURE)

        def is_need_apply(self, args: Namespace) -> bool:
            return bool(getattr(args, self.feature_name, False))

        def register_args(self, parser: ArgumentParser) -> None:
            from mindspeed_recovery.frameworks.megatron_flag import add_recovery_arguments

            add_recovery_arguments(parser)

        def register_patches(self, patch_manager: Any, args: Namespace) -> None:
            register(patch_manager)

    return RecoveryFeature()


def _holds_function(location: Location) -> bool:
    """False in a stack without the module. Raises LocationError, with candidates, if it is there and has no such function."""
    try:
        importlib.import_module(location.module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{location.module}.".startswith(f"{error.name}."):
            raise
        logger.warning("--%s: %s is not wrapped, there is no module '%s'", FEATURE, location, error.name)
        return False
    place = location.place()
    if place is None or not callable(place.get()):
        raise LocationError(
            f"{location}: a function to wrap was looked for, and None found; a patch registered earlier through a name that "
            "the module lacks has made it"
        )
    return True


def _end_plain_route(locations: list[Location]) -> None:
    """Take off what a parsed flag has wrapped already, for a Megatron without MindSpeed.

    MindSpeed would take it for the originals, which it puts back whenever it removes its patches.
    """
    from mindspeed_recovery.frameworks import megatron_loop

    places = [place for location in locations if (place := location.place()) is not None]
    before = [place.get() for place in places]
    megatron_loop.uninstall()
    for place, value in zip(places, before):
        if place.get() is not value:
            _rebind(place.attribute, value, place.get())


def _rebind(name: str, old: Any, new: Any, *, where: str = "") -> None:
    """``new`` for ``old`` under ``name`` in every loaded module with ``where`` in its own name."""
    for module_name, module in list(sys.modules.items()):
        if where in module_name and isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)
