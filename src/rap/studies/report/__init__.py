"""Result files to documents: Markdown tables, an HTML page, figures.

In: JSON with tables and provenance.
Out: pages in which no figure was typed.
"""
