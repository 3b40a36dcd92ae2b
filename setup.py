# SPDX-License-Identifier: Apache-2.0
"""Packaging of mindspeed-recovery; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# torch is not a requirement: it is the user's own build, for the user's own device.
REPORT = ["matplotlib>=3.7", "tensorboard>=2.14"]
DEMO = [*REPORT, "numpy>=1.24", "rich>=13"]
TEST = [*DEMO, "hypothesis>=6.90", "mypy>=1.8", "pytest>=8.4", "pytest-timeout>=2.2", "pytest-xdist>=3.5", "ruff>=0.6"]
# What megatron.training imports; the tests of its loop, and examples/pretrain_gpt.py, need it.
TEST += ["psutil", "pyyaml", "regex", "requests", "tqdm"]
TEST += ["wandb"]  # its sink is tested with the real one, offline

setup(
    name="mindspeed-recovery",
    version="0.1.0",
    description="Makes the global state of Megatron / MindSpeed training recoverable in place, bit for bit",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # The catalogue lives at the top of the repository and is shipped inside the package.
    packages=[*find_packages(include=["mindspeed_recovery", "mindspeed_recovery.*"]), "mindspeed_recovery.patches"],
    package_dir={"mindspeed_recovery.patches": "patches"},
    package_data={"mindspeed_recovery": ["py.typed"], "mindspeed_recovery.patches": ["*.toml"]},
    install_requires=["packaging>=22", "wrapt>=1.15", "tomli>=2; python_version < '3.11'"],
    extras_require={"report": REPORT, "demo": DEMO, "test": TEST},
    entry_points={"console_scripts": ["mindspeed-recovery = mindspeed_recovery.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
