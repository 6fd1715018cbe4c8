package taskbox

import "syscall"

// networkTypes are the magic numbers of statfs(2) of file systems that aren't a local
// disk.
var networkTypes = map[uint32]string{
	0x00006969: "NFS",
	0x0000517B: "SMB",
	0xFE534D42: "SMB",
	0xFF534D42: "SMB (cifs)",
	0x0000564C: "NCP",
	0x01021997: "9p (a folder of the virtual machine's host)",
	0x65735546: "FUSE (sshfs, virtiofs or a folder of the container's host)",
	0x786F4256: "vboxsf (a folder of the virtual machine's host)",
	0x5346414F: "AFS",
	0x6B414653: "AFS",
	0x73757245: "Coda",
	0x00C36400: "Ceph",
	0x0BD00BD0: "Lustre",
	0x47504653: "GPFS",
	0x01161970: "GFS2",
	0x7461636F: "OCFS2",
}

// networkFS names the file system that the path is on, if it isn't a local disk.
func networkFS(path string) string {
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return ""
	}
	return networkTypes[uint32(st.Type)] // signed on some machines, and 32 or 64 bits
}
