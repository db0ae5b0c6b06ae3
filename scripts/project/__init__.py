"""How a project is cut from its template, kept fresh, and given new parts. Needs git 2.38 and Python's own library."""
