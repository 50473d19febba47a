"""Retrieval from a long context: facts asked for again, tasks after RULER, passages read twice.

In: a model, its tokenizer and a text that documents are made of.
Out: shares of right answers, by length, depth, distance or task, with intervals.
"""
