"""Drivers for SGLang's HiCache. Importing this imports no engine."""
