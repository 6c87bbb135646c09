"""Katz back-off n-gram models: counting, estimation and lookup tables."""

from specdec.ngram.table import find_context
from specdec.ngram.table import load_table
from specdec.ngram.table import NGramTable
from specdec.ngram.table import save_table

__all__ = ('NGramTable', 'find_context', 'load_table', 'save_table')
