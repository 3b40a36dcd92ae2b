# SPDX-License-Identifier: Apache-2.0
"""Draw a random sample of the audit's untracked findings, to be labelled by reading the source of each.

``python tests/audit_sample.py --seed 7 --count 100 NAME=PATH …`` prints one line of JSON for each: tree, rule, location. The
draw takes the findings whose digests with the seed are the least: a change of the rules changes no more of the sample than
what it adds or takes away.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json

from mindspeed_recovery import cli


def untracked(path: str) -> list[dict[str, object]]:
    """The untracked findings of one tree."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["audit", path, "--only", "untracked", "--json"])
    found: list[dict[str, object]] = json.loads(out.getvalue())["findings"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("trees", nargs="+", metavar="NAME=PATH")
    args = parser.parse_args()
    findings = [
        (name, finding) for name, _, path in (tree.partition("=") for tree in args.trees) for finding in untracked(path)
    ]

    def lot(one: tuple[str, dict[str, object]]) -> bytes:
        return hashlib.sha256(f"{args.seed} {one[0]} {one[1]['rule']} {one[1]['location']}".encode()).digest()

    for name, finding in sorted(findings, key=lot)[: args.count]:
        print(json.dumps({"tree": name, "rule": finding["rule"], "location": finding["location"]}))


if __name__ == "__main__":
    main()
