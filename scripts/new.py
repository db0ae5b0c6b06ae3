"""Make a project from this template, keep it fresh, or begin a part of it: python scripts/new.py --help"""

from project.command import main

if __name__ == "__main__":
    main()
