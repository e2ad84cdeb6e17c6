# SPDX-License-Identifier: Apache-2.0
"""`python -m fi_backend`: the command line where the package is on the path but not installed."""

from fi_backend.cli.main import app

app(prog_name="fi-backend")
