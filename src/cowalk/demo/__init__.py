"""`cowalk demo`: a small net learns handwritten digits, and its table is printed.

What lives here: the digits, one file a framework with a net as a user would write it, and the loop that runs any of them.
"""
