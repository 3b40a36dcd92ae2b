# SPDX-License-Identifier: Apache-2.0
"""The patch manager. A patch is a dotted name, at most one replacement, and any number of wrappers around it."""

import importlib
import sys
import types
from typing import ClassVar

_ABSENT = object()


class Patch:
    def __init__(self, target, new, create_dummy):
        self.target = target
        self.owner_name, _, self.attribute = target.rpartition(".")
        self.owner = self.orig_func = self.patch_func = self.final_patch_func = None
        self.wrappers = []
        self.create_dummy = create_dummy
        self.is_applied = False
        self.set_patch_func(new if new is not None else _missing(target))

    def set_patch_func(self, new, force_patch=False):
        self.is_applied = False
        if getattr(new, "__name__", "").endswith(("wrapper", "decorator")):
            if new not in self.wrappers:
                self.wrappers.append(new)
        elif self.patch_func is None or force_patch:
            self.patch_func = new
        else:
            raise RuntimeError(f"the patch of {self.attribute} exist !")

    def apply_patch(self):
        if self.is_applied:
            return
        owner, current = self._find()
        if self.owner is None:
            self.owner, self.orig_func = owner, current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.owner, self.attribute, final)
        for module in list(sys.modules.values()):
            if getattr(module, self.attribute, _ABSENT) is current:
                setattr(module, self.attribute, final)
        self.final_patch_func, self.is_applied = final, True

    def remove_patch(self):
        for name, module in list(sys.modules.items()):
            if "mindspeed" in name:
                continue
            if isinstance(self.owner, type):
                module = getattr(module, self.owner_name.rpartition(".")[2], module)
            if getattr(module, self.attribute, _ABSENT) is self.final_patch_func:
                setattr(module, self.attribute, self.orig_func)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False

    def remove_wrappers(self, names=None):
        names = [names] if isinstance(names, str) else names
        self.wrappers[:] = [] if names is None else [w for w in self.wrappers if w.__name__ not in names]

    def _find(self):
        parts = self.owner_name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                parent = sys.modules.get(".".join(parts[: end - 1]))
                if hasattr(parent, parts[end - 1]):  # a class
                    owner = getattr(parent, parts[end - 1])
                    if not hasattr(owner, self.attribute):
                        raise RuntimeError(f"no exist {self.attribute} of {owner}") from None
                    return owner, getattr(owner, self.attribute)
                if not self.create_dummy:
                    raise
                sys.modules[path] = types.ModuleType(path)
                if parent is not None:
                    setattr(parent, parts[end - 1], sys.modules[path])
        owner = sys.modules[self.owner_name]
        if not hasattr(owner, self.attribute):
            setattr(owner, self.attribute, None)
        return owner, getattr(owner, self.attribute)


def _missing(target):
    def missing(*args, **kwargs):
        raise RuntimeError(f"function {target} no exist")

    return missing


class MindSpeedPatchesManager:
    patches_info: ClassVar[dict] = {}

    @staticmethod
    def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        patches = MindSpeedPatchesManager.patches_info
        if orig_func_name in patches:
            patches[orig_func_name].set_patch_func(new_func, force_patch)
        else:
            patches[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)

    @staticmethod
    def remove_wrappers(orig_func_name, wrappers_name, remove_check=True):
        if orig_func_name not in MindSpeedPatchesManager.patches_info:
            raise ValueError(f"The function <{orig_func_name}> not exist.")
        patch = MindSpeedPatchesManager.patches_info[orig_func_name]
        before = len(patch.wrappers)
        patch.remove_wrappers(wrappers_name)
        if remove_check and len(patch.wrappers) == before:
            raise RuntimeError("nothing was removed")

    @staticmethod
    def remove_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.remove_wrappers()

    @staticmethod
    def apply_patches():
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()
