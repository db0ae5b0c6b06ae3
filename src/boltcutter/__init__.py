"""A Lightning project template: every run is checked, traced, resumed and made again."""
