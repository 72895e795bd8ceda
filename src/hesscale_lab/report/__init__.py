"""Figures, tables and one page about finished runs. A report reads run folders; it never trains."""
