"""`streamlit run streamlit_app.py -- FOLDER...`; `dashboard/launch.py` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

from servetwin.dashboard.app import main

main([Path(argument) for argument in sys.argv[1:]])
