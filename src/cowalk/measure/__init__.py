"""What arrays of a model are like, measured and shown: moments, back ends that measure, and the table.

What lives here: statistics of arrays, and tables of them. What may not: how a framework differentiates or trains.
"""

from cowalk.measure.moments import Adam, Moments, Pair
from cowalk.measure.obstacles import MeasureError
from cowalk.measure.rows import Row
from cowalk.measure.stats import ratio, stats
from cowalk.measure.table import Table

__all__ = ["Adam", "MeasureError", "Moments", "Pair", "Row", "Table", "ratio", "stats"]
