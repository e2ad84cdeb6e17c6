# SPDX-License-Identifier: Apache-2.0
"""The plug-in for SGLang."""

from typing import Final

# Of the attention back end.
NAME: Final = "fi"
