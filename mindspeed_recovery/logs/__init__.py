# SPDX-License-Identifier: Apache-2.0
"""Sinks of the training log, and the rule by which a recovered run logs each point once.

`held` is the rule, `tensorboard` and `wandb` are sinks that follow it, `sinks` finds those of a job.
"""
