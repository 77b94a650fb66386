"""The one store: its port, its key tree, its records, and the two implementations of the port.

Here belongs what reads or writes keys, and leading, which is a key. Only the `etcd` module knows etcd3gw; no other
package knows keys as text.
"""
