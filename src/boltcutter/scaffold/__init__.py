"""Create projects, add files to them, and copy the library into them."""
