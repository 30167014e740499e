#!/usr/bin/env python
# A file that uses torch for nothing else.
import backquant


def qconfig():
    return backquant.get_default_qconfig("x86")
