// Package tarball reads and writes tar archives: ustar, PAX and the GNU extensions for
// long names and large numbers.
//
// It exists beside archive/tar because the guest is resident thousands of times on one
// machine: that package's tables and imports cost each of them about 90 KiB of private
// memory. It must not know file systems: what an entry may do is internal/guest/file's
// business. Start at reader.go; header.go has the fields.
package tarball
