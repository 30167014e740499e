"""Models whose reports a person looks at; tests run them."""
