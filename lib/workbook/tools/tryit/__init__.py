"""An exercise that a reader of the site solves on the page: the chapter's own checks, in the browser's Python."""
