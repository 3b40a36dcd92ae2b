# SPDX-License-Identifier: Apache-2.0
"""A stand-in for MindIO TFT, written from its observed behaviour: real controller, processors and threads, no device."""
