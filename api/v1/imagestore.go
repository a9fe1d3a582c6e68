package v1

// LayerCache is what one node has of a layer, and what was done with it since the node
// started.
type LayerCache struct {
	MetaDigest   string `json:"meta_digest"`
	CachedBytes  int64  `json:"cached_bytes" doc:"Of its data and metadata, on the node."`
	ReadBytes    int64  `json:"read_bytes" doc:"Of its data, by whoever had to ask for it: reads of what the kernel has in memory, or of a layer that is there whole, are not seen."`
	FetchedBytes int64  `json:"fetched_bytes" doc:"Of its data, from the object store."`
	FailedReads  int64  `json:"failed_reads,omitempty" doc:"Reads that ended with an I/O error."`
}

// ImageCache is what one node has of all images.
type ImageCache struct {
	Node       string       `json:"node"`
	Mode       string       `json:"mode" doc:"How readers wait for data: fanotify or fuse."`
	UsedBytes  int64        `json:"used_bytes" doc:"Of image data."`
	LimitBytes int64        `json:"limit_bytes" doc:"0: none."`
	Layers     []LayerCache `json:"layers,omitempty"`
}

// ImageUse is what one image takes. What it shares with other images is counted for each.
type ImageUse struct {
	Name         string           `json:"name"`
	Digest       string           `json:"digest"`
	Bytes        int64            `json:"bytes" doc:"Of its layers, uncompressed."`
	OwnStored    int64            `json:"own_stored_bytes" doc:"In the object store, compressed, of layers and chunks that no other image has."`
	SharedStored int64            `json:"shared_stored_bytes" doc:"The same, that others have too."`
	Cached       map[string]int64 `json:"cached_bytes" doc:"On each node that has some of it."`
}

// ImageUsage is what images take.
type ImageUsage struct {
	Items       []ImageUse   `json:"items"`
	StoredBytes int64        `json:"stored_bytes" doc:"Of all images in the object store, each chunk once."`
	Nodes       []ImageCache `json:"nodes"`
	Builds      BuildUsage   `json:"builds" doc:"What builds keep for later ones."`
}

// BuildUsage is what images that builds keep take together.
type BuildUsage struct {
	Images     int   `json:"images"`
	Bytes      int64 `json:"bytes" doc:"Of layers that no other image has, uncompressed."`
	LimitBytes int64 `json:"limit_bytes" doc:"Beyond it a collection removes those that were not used for longest. 0: none."`
	AgeSeconds int64 `json:"max_age_s" doc:"After so long without use a collection removes them. 0: never."`
}

// CollectReport says what one pass of a garbage collection of the object store did.
type CollectReport struct {
	Pass           int      `json:"pass"`
	Builds         int      `json:"builds,omitempty" doc:"Images that builds kept, which were removed before the first pass."`
	Layers         int      `json:"layers" doc:"That are needed."`
	NeededBytes    int64    `json:"needed_bytes" doc:"Compressed."`
	Condemned      int      `json:"condemned" doc:"Objects found to be unneeded."`
	CondemnedBytes int64    `json:"condemned_bytes"`
	Deleted        int      `json:"deleted" doc:"Objects condemned by an earlier pass."`
	Spared         int      `json:"spared" doc:"Condemned objects that are needed after all."`
	Rewritten      int      `json:"rewritten" doc:"Packs of which what is needed was copied."`
	CopiedBytes    int64    `json:"copied_bytes"`
	Expired        int      `json:"expired" doc:"Leases of writers that fell silent."`
	Waiting        int      `json:"waiting" doc:"Condemnations that wait for writers or for time to pass."`
	Damaged        []string `json:"damaged,omitempty" doc:"Packs that images need and that cannot be read: import those again."`
	Done           bool     `json:"done,omitempty" doc:"The last pass: nothing is left to do now."`
	Error          *Problem `json:"error,omitempty" doc:"Last line of a failure."`
}

// WarmProgress is how far one node is with fetching an image.
type WarmProgress struct {
	Node  string   `json:"node"`
	Done  int64    `json:"done" doc:"Bytes of the image that are on the node."`
	Total int64    `json:"total" doc:"The same when all of it is."`
	Trace bool     `json:"trace,omitempty" doc:"What an earlier start read is known, and was fetched."`
	End   bool     `json:"end,omitempty" doc:"The node's last line."`
	Error *Problem `json:"error,omitempty"`
}

// EvictReport is what evicting an image from one node did.
type EvictReport struct {
	Node       string   `json:"node"`
	FreedBytes int64    `json:"freed_bytes"`
	InUse      int      `json:"in_use" doc:"Layers that stay since sandboxes use them."`
	Error      *Problem `json:"error,omitempty"`
}

// EvictReports is what each node says.
type EvictReports struct {
	Items []EvictReport `json:"items"`
}

// EdgeWarm asks an edge to fetch an image.
type EdgeWarm struct {
	Image Image `json:"image"`
	All   bool  `json:"all"`
}

// EdgeKeep tells an edge what the catalogue has: of all else nothing needs to stay.
type EdgeKeep struct {
	Images []string `json:"images"` // digests
	Layers []string `json:"layers"` // metadata digests
}

// DefaultCollapse is the size below which neighbouring layers are merged, in bytes.
const DefaultCollapse = 16 << 20
