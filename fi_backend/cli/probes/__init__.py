# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at, one module a subject; what fails becomes part of the answer."""
