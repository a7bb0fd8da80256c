"""What arrays of a model are like, measured and shown: the ratio of parameters to gradients, and its table.

What lives here: statistics of arrays, and tables of them. What may not: how a framework differentiates or trains.
"""

from cowalk.measure.quotients import Ratio
from cowalk.measure.ratios import MeasureError, ratio
from cowalk.measure.table import RatioRow, RatioTable

__all__ = ["MeasureError", "Ratio", "RatioRow", "RatioTable", "ratio"]
