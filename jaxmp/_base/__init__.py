"""What all of jaxmp stands on: policies, dtypes, trees and checks of arguments.

Nothing here knows of jaxprs, loss scales or devices, so that importing it is cheap.
"""
