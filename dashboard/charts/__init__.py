"""Charts of a run: pure functions from its tables to Plotly figures, one module per topic.

Every figure is thinned to what a browser can draw (`thinning`), has units on its axes and the colours of `style`.
"""
