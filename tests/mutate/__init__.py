"""Mutation tests: would the tests of a pure module notice a changed operator, constant or argument?"""
