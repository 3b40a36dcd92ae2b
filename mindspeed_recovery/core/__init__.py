# SPDX-License-Identifier: Apache-2.0
"""What a recovery does with one process's state. Knows torch and nothing else of the stack."""
