# SPDX-License-Identifier: Apache-2.0
"""A package with one device tensor in each hiding place that Python has, and with what an audit must not report.

`cases.py` says where each is. The tensors are made by ``fill(device)``, as a training step would make them.
"""
