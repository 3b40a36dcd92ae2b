# SPDX-License-Identifier: Apache-2.0
"""What one Python module says about the state of its process: the facts that `audit_facts` reads and `audit_link` joins.

The facts are small and name no node of the tree, so that a whole framework's fit in memory while its sources do not have
to. They are flows: *this value is put there*. A value is a set of atoms, tuples that say where it comes from:

==================  ====================================================================================
``("!", word, n)``  a tensor, parameter, handle or random state: what, how sure and why; the line
``("g", name)``     a name of the module: its own global, an import, or a builtin
``("m", target)``   ``module`` or ``module:NAME``, imported within a function
``("p", f, i)``     parameter i of the function f
``("s", c)``        an instance of the class c; ``("c", c)`` the class; ``("f", f)`` a function
``("cell", f, x)``  the local x of the function f, captured by a function within it
``(".", a, x)``     attribute x of the atom a; ``("()", a, n)`` the result of calling it, the n-th call of the module
``("+", a)``        a tensor if a is one: the result of an operation
``("x", b, a)``     the same, if b is a function of no module that is read
``("super", c)``    what c inherits; ``("meta", c)`` an instance of a class that c is the metaclass of
``("i", a, k)``     item k of a tuple that a call returned; ``("e", a)`` a container that has the atom in it
==================  ====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Atom = tuple[Any, ...]
Atoms = tuple[Atom, ...]
NOTHING: Atoms = ()


class Flow(NamedTuple):
    """``values`` are put at ``place``. ``how``: ``=``, ``+=``, ``item`` (into it), ``use`` (is annotated as such), ``used``
    (is treated as such), or the name of the method that does it."""

    place: Atom
    values: Atoms
    how: str
    line: int
    function: str


class Call(NamedTuple):
    """A call: its positional arguments (the starred ones are the last), and those by name."""

    callee: Atoms
    arguments: tuple[Atoms, ...]
    keywords: tuple[tuple[str, Atoms], ...]


@dataclass
class FunctionFacts:
    """One function. ``receiver``: ``self``, ``cls`` or ``""``; ``mutable``: parameters whose default is a container, by
    index; ``cells``: captured locals of enclosing functions."""

    name: str
    line: int
    owner: str
    receiver: str
    parameters: tuple[str, ...]
    star: int
    mutable: frozenset[int]
    cached: bool
    is_property: bool
    nested: bool
    decorators: Atoms = NOTHING
    cells: set[tuple[str, str]] = field(default_factory=set)
    denied: dict[int, str] = field(default_factory=dict)
    """What the annotation of a parameter rules out, by index; of the result, under -1. See `audit_words.denies`."""


@dataclass
class ClassFacts:
    """One class. ``attributes``: what its body binds, by name: line and ``value``, ``container``, ``property`` or ``field``
    (each instance has its own); ``methods``: the functions of the module by name; ``registered``: parameters and buffers."""

    name: str
    line: int
    bases: tuple[str, ...]
    metaclass: str
    is_record: bool
    is_local: bool = False
    """It is made anew by each call of a function."""
    attributes: dict[str, tuple[int, str]] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    denied: dict[str, str] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)
    """Attributes that a method gives each instance anew."""
    called: set[str] = field(default_factory=set)
    """Attributes, and methods, that are called as ``self.name()`` or used as modules are: no tensors."""
    decorators: Atoms = NOTHING


@dataclass
class ModuleFacts:
    """The facts of one module. ``globals``: the line where each is bound first; ``containers``: those bound to a container;
    ``reads``: where names, and attributes (as ``.name``), are read; ``ignores``: by line, the rules and the reason."""

    module: str
    path: str
    is_package: bool = False
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    globals: dict[str, int] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)
    queues: set[str] = field(default_factory=set)
    denied: dict[str, str] = field(default_factory=dict)
    functions: dict[str, FunctionFacts] = field(default_factory=dict)
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    flows: list[Flow] = field(default_factory=list)
    returns: list[tuple[str, int, Atoms]] = field(default_factory=list)
    """Function, index in the returned tuple or -1, value."""
    calls: list[Call] = field(default_factory=list)
    reads: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    ignores: dict[int, tuple[frozenset[str], str]] = field(default_factory=dict)
