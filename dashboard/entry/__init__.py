"""The script that Streamlit starts, apart from `pages/`.

Streamlit takes a folder of that name beside its script for pages of its own kind, and would run them as scripts.
"""
