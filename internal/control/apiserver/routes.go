package apiserver

import (
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Errors of whatever concerns one sandbox.
var ofSandbox = []errs.Code{errs.SandboxNotFound, errs.SandboxGone, errs.SandboxLost, errs.EdgeUnreachable, errs.ConnectionLost, errs.DeadlineExceeded}

var ofCreate = []errs.Code{
	errs.BadSpec, errs.SpecTooLarge, errs.UnknownBackend, errs.ImageNotFound, errs.ImageCorrupt, errs.IdempotencyReuse, errs.NodeFull, errs.NoNode, errs.DiskFull,
	errs.EdgeUnreachable, errs.GuestUnreachable, errs.ConnectionLost, errs.ShuttingDown, errs.DeadlineExceeded, errs.SandboxGone, errs.SandboxLost,
	errs.UserNotFound, errs.CwdNotFound, errs.NotSupported, errs.RequestCanceled,
}

var ofStore = []errs.Code{errs.ConnectionLost, errs.DeadlineExceeded}

// routes registers every operation.
func (s *Server) routes() {
	s.sandboxRoutes()
	s.imageRoutes()
	s.snapshotRoutes()
	s.storeRoutes()
	s.adminRoutes()
	s.mux.HandleFunc("/", s.notFound)
}

func (s *Server) sandboxRoutes() {
	const tag = "sandboxes"
	handle(s, op{
		id: "create-sandbox", method: http.MethodPost, path: "/v1/sandboxes", tag: tag, right: v1.RightSandbox, status: 201,
		summary: "Create a sandbox",
		text: "Answers when the sandbox's guest does: the sandbox is usable at once. A client that goes away cancels the create, and nothing is left of it. " +
			"An error after an edge was chosen names the sandbox id that was tried.",
		errors: ofCreate,
	}, s.createOne)
	handleStream(s, op{
		id: "create-sandboxes", method: http.MethodPost, path: "/v1/sandboxes/batch", tag: tag, right: v1.RightSandbox,
		summary: "Create several sandboxes of one spec",
		text: "A line for each, as it is ready or has failed, in no order. What could not be told to a client that went away is removed. " +
			"With an Idempotency-Key a repeated request finds those that were made and makes those that failed.",
		errors: []errs.Code{errs.BadSpec, errs.UnknownBackend}, line: v1.CreateResult{},
	}, s.createBatch)
	handle(s, op{
		id: "list-sandboxes", method: http.MethodGet, path: "/v1/sandboxes", tag: tag, right: v1.RightRead,
		summary: "List sandboxes", text: "Ordered by id. Events from the list's revision on are what happened after it.",
	}, s.list)
	handle(s, op{
		id: "get-sandbox", method: http.MethodGet, path: "/v1/sandboxes/{id}", tag: tag, right: v1.RightRead,
		summary: "Inspect a sandbox", text: "With its usage, as long as its node answers.", errors: ofSandbox,
	}, s.get)
	handle(s, op{
		id: "renew-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/renew", tag: tag, right: v1.RightSandbox, status: 204, body: -1,
		summary: "Renew a sandbox's lease",
		text: "Says that whoever uses the sandbox is still there. One that was created with `lease_s` is removed when it was not renewed for so long; renew it a few times in " +
			"each lease. Renewals are not kept over a restart of the node: every lease then begins anew. Nothing happens to a sandbox without a lease.",
		errors: ofSandbox,
	}, s.renew)
	handle(s, op{
		id: "delete-sandbox", method: http.MethodDelete, path: "/v1/sandboxes/{id}", tag: tag, right: v1.RightSandbox, status: 204,
		summary: "Remove a sandbox", text: "In whatever state it is. Answers when nothing of it is left.", errors: append([]errs.Code{errs.BackendUnusable}, ofSandbox...),
	}, s.deleteOne)
	handleStream(s, op{
		id: "delete-sandboxes", method: http.MethodPost, path: "/v1/sandboxes/delete", tag: tag, right: v1.RightSandbox,
		summary: "Remove several sandboxes", text: "By their ids, or all that have the labels. A line for each, in no order.", line: v1.DeleteResult{},
	}, s.deleteMany)
	handleStream(s, op{
		id: "pause-sandboxes", method: http.MethodPost, path: "/v1/sandboxes/pause", tag: tag, right: v1.RightSandbox,
		summary: "Pause several sandboxes",
		text: "By their ids, or all that have the labels. A line for each, in the order in which they end; those of a job are paused by one call. " +
			"A client that goes away ends it: what has begun by then is paused all the same.",
		line: v1.PauseResult{},
	}, s.pauseMany)
	handleStream(s, op{
		id: "resume-sandboxes", method: http.MethodPost, path: "/v1/sandboxes/resume", tag: tag, right: v1.RightSandbox,
		summary: "Resume several sandboxes", text: "By their ids, or all that have the labels. A line for each, in the order in which they end.", line: v1.PauseResult{},
	}, s.resumeMany)
	handle(s, op{
		id: "pause-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/pause", tag: tag, right: v1.RightSandbox, body: -1,
		summary: "Pause a sandbox",
		text: "Its processes stand still, and their memory is moved out. Any operation in it resumes it first. One that is paused stays so, which is a success. " +
			"Answers when its memory is free.",
		errors: append([]errs.Code{errs.StateConflict, errs.SwapFull, errs.NotSupported, errs.BackendUnusable, errs.ShuttingDown}, ofSandbox...),
	}, s.pauseOne)
	handle(s, op{
		id: "resume-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/resume", tag: tag, right: v1.RightSandbox, body: -1,
		summary: "Resume a sandbox",
		text:    "One that runs goes on, which is a success. If the node has no room for it, it stays paused, and the error `node_full` says what would free some.",
		errors:  append([]errs.Code{errs.StateConflict, errs.NodeFull, errs.NotSupported, errs.BackendUnusable, errs.GuestUnreachable, errs.ShuttingDown}, ofSandbox...),
	}, s.resumeOne)
	handle(s, op{
		id: "hint-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/hint", tag: tag, right: v1.RightSandbox,
		summary: "Say when a sandbox is used next",
		text: "The node pauses it if holding its memory until then costs more than pausing and resuming it, and says what it did and why. " +
			"It does not pause what is in use: a running command, an attached stream, a connection to a port.",
		errors: append([]errs.Code{errs.StateConflict, errs.SwapFull, errs.NotSupported, errs.BackendUnusable, errs.ShuttingDown}, ofSandbox...),
	}, s.hint)
	handle(s, op{
		id: "list-usage", method: http.MethodGet, path: "/v1/sandboxes/usage", tag: tag, right: v1.RightRead,
		summary: "What sandboxes use",
		text: "By nodes, with what each node itself has and uses. Of all sandboxes if neither ids nor labels are given: then it may be a second old. " +
			"Reading wakes no paused sandbox. A node that does not answer has an error; its sandboxes are listed without usage.",
	}, s.uses)
	handle(s, op{
		id: "create-capability", method: http.MethodPost, path: "/v1/sandboxes/{id}/capability", tag: "data plane", right: v1.RightSandbox, status: 201, body: -1,
		summary: "Get a capability for a sandbox",
		text:    "A signed, short-lived token for an Aether connection to the sandbox's edge itself, without the apiserver between.",
		errors:  ofSandbox,
	}, s.capability)
	handleStream(s, op{
		id: "watch-events", method: http.MethodGet, path: "/v1/events", tag: tag, right: v1.RightRead,
		summary: "Read or follow events",
		text: "Changes of sandboxes and nodes in the order of their revision, none missing and none twice. " +
			"As lines, or as server-sent events with `Accept: text/event-stream`. A stream that the server has to end says why in its last line.",
		errors: []errs.Code{errs.RevisionCompacted, errs.TokenLimit}, line: v1.Event{},
	}, s.events)
	handleStream(s, op{
		id: "aether", method: http.MethodGet, path: "/v1/aether", tag: "data plane", right: v1.RightRead,
		summary: "Open an Aether connection",
		text: "With `Connection: Upgrade` and `Upgrade: aether/1`. After the 101 the connection speaks Aether. A stream's target is a sandbox id; " +
			"it needs the right `sandbox`, and its method is one of a guest: process.*, session.*, file.*, port.*, guest.*, or batch. How many connections and streams a token has open is limited.",
		errors: []errs.Code{errs.TokenLimit},
	}, s.aether)
	events := s.api.OpenAPI().Paths["/v1/events"].Get
	events.Responses["200"].Content["text/event-stream"] = &huma.MediaType{Schema: &huma.Schema{Type: huma.TypeString}}
	upgrade := s.api.OpenAPI().Paths["/v1/aether"].Get
	delete(upgrade.Responses, "200")
	upgrade.Responses["101"] = &huma.Response{Description: "The connection speaks Aether from here on."}
}

func (s *Server) imageRoutes() {
	const tag = "images"
	handleStream(s, op{
		id: "import-image", method: http.MethodPost, path: "/v1/images", tag: tag, right: v1.RightImage, body: -1,
		summary: "Import an image",
		text:    "The body is the archive, of any size. Lines tell the progress; the last one has the image, or the error. Errors before any progress are plain.",
		errors: []errs.Code{errs.ImageCorrupt, errs.ImageUnsupported, errs.DiskFull, errs.NoNode, errs.EdgeUnreachable, errs.ConnectionLost,
			errs.DeadlineExceeded, errs.RequestCanceled, errs.BodyTooLarge, errs.NodeFull, errs.ShuttingDown},
		line: v1.ImageProgress{},
	}, s.importImage)
	s.api.OpenAPI().Paths["/v1/images"].Post.RequestBody = &huma.RequestBody{
		Required: true, Description: "A tar, docker-archive, or tar of an OCI layout or directory.",
		Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}
	ofRegistry := append([]errs.Code{errs.RegistryDenied, errs.RegistryNotFound, errs.RegistryBusy, errs.RegistryDown, errs.NoNode}, ofMaking...)
	handleStream(s, op{
		id: "pull-image", method: http.MethodPost, path: "/v1/images/pull", tag: tag, right: v1.RightImage,
		summary: "Pull an image from a registry", text: "The edge reads it from any OCI registry. Lines tell the progress; the last one has the image, or the error. A client that goes away ends it.",
		errors: ofRegistry, line: v1.ImageProgress{},
	}, s.pullImage)
	handleStream(s, op{
		id: "push-image", method: http.MethodPost, path: "/v1/images/push", tag: tag, right: v1.RightImage,
		summary: "Push an image to a registry", text: "As one layer; what the registry has is not sent again. The tag appears when everything is there. Lines tell the progress; the last one has what was pushed, or the error.",
		errors: append([]errs.Code{errs.ImageNotFound}, ofRegistry...), line: v1.ImageProgress{},
	}, s.pushImage)
	handleStream(s, op{
		id: "export-image", method: http.MethodGet, path: "/v1/export", tag: tag, right: v1.RightImage,
		summary: "Export an image or snapshot", text: "The answer is a tar of unknown length. One that breaks off is not whole.",
		errors: append([]errs.Code{errs.ImageNotFound, errs.NoNode}, ofMaking...),
	}, s.exportImage)
	s.api.OpenAPI().Paths["/v1/export"].Get.Responses["200"] = &huma.Response{
		Description: "The archive.", Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}
	handle(s, op{
		id: "list-images", method: http.MethodGet, path: "/v1/images", tag: tag, right: v1.RightRead, summary: "List images", text: "The whole catalogue, by name.",
	}, s.listImages)
	handle(s, op{
		id: "get-image", method: http.MethodGet, path: "/v1/images/{name}", tag: tag, right: v1.RightRead, summary: "Inspect an image", text: "By name or digest.",
		errors: []errs.Code{errs.ImageNotFound},
	}, s.getImage)
	handle(s, op{
		id: "delete-image", method: http.MethodDelete, path: "/v1/images/{name}", tag: tag, right: v1.RightImage, status: 204,
		summary: "Remove an image", text: "By name, or by digest all its names. Refused while a sandbox uses what would be removed, or a snapshot was made on it.",
		errors: append([]errs.Code{errs.ImageNotFound, errs.ImageInUse, errs.EdgeUnreachable}, ofStore...),
	}, s.deleteImage)
}

// Errors of making an image at an edge.
var ofMaking = []errs.Code{errs.ImageCorrupt, errs.ImageUnsupported, errs.DiskFull, errs.EdgeUnreachable, errs.ConnectionLost,
	errs.DeadlineExceeded, errs.RequestCanceled, errs.BodyTooLarge}

func (s *Server) snapshotRoutes() {
	const tag = "snapshots"
	handleStream(s, op{
		id: "snapshot-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/snapshot", tag: tag, right: v1.RightSandbox,
		summary: "Make a snapshot of a sandbox",
		text: "Packs the files that the sandbox changed into one more layer on its image, while it stands still for a moment. Processes are not in it. " +
			"`snap:NAME` is an image from which sandboxes are created, with the source's environment, user, working directory and labels. " +
			"Lines tell the progress; the last one has the image, or the error.",
		errors: append(append([]errs.Code{errs.NameInUse, errs.StateConflict, errs.SandboxNotRunning, errs.NotSupported, errs.NodeFull, errs.ImageNotFound}, ofMaking...), ofSandbox...),
		line:   v1.ImageProgress{},
	}, s.snapshotSandbox)
	handleStream(s, op{
		id: "fork-sandbox", method: http.MethodPost, path: "/v1/sandboxes/{id}/fork", tag: tag, right: v1.RightSandbox,
		summary: "Fork a sandbox",
		text: "Makes children on its node that begin with its files, limits, environment and labels; the source stands still for a moment and runs on. " +
			"Processes are not copied. A line for each child, as it is ready or has failed, in no order. What could not be told to a client that went away is removed.",
		errors: append([]errs.Code{errs.StateConflict, errs.SandboxNotRunning, errs.NotSupported, errs.NodeFull, errs.DiskFull, errs.RequestCanceled, errs.ShuttingDown}, ofSandbox...),
		line:   v1.CreateResult{},
	}, s.forkSandbox)
	handleStream(s, op{
		id: "import-snapshot", method: http.MethodPost, path: "/v1/snapshots", tag: tag, right: v1.RightImage, body: -1,
		summary: "Import a snapshot",
		text:    "The body is an archive that `GET /v1/export?format=snapshot` made, here or elsewhere. All of it is verified. Lines as of an image's import.",
		errors:  append([]errs.Code{errs.NameInUse, errs.NoNode}, ofMaking...), line: v1.ImageProgress{},
	}, s.importSnapshot)
	s.api.OpenAPI().Paths["/v1/snapshots"].Post.RequestBody = &huma.RequestBody{
		Required: true, Description: "An archive of a snapshot.",
		Content: map[string]*huma.MediaType{"application/x-tar": {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}},
	}
	handle(s, op{
		id: "list-snapshots", method: http.MethodGet, path: "/v1/snapshots", tag: tag, right: v1.RightRead, summary: "List snapshots",
		text: "By name. `snapshot.parents` says what each was made on.",
	}, s.listSnapshots)
	handle(s, op{
		id: "get-snapshot", method: http.MethodGet, path: "/v1/snapshots/{name}", tag: tag, right: v1.RightRead, summary: "Inspect a snapshot",
		text: "With or without `snap:`.", errors: []errs.Code{errs.ImageNotFound},
	}, s.getSnapshot)
	handle(s, op{
		id: "delete-snapshot", method: http.MethodDelete, path: "/v1/snapshots/{name}", tag: tag, right: v1.RightSandbox, status: 204, summary: "Remove a snapshot",
		text:   "Refused while a sandbox uses it or another snapshot was made on it.",
		errors: append([]errs.Code{errs.ImageNotFound, errs.ImageInUse, errs.EdgeUnreachable}, ofStore...),
	}, s.deleteSnapshot)
}

func (s *Server) storeRoutes() {
	const tag = "image store"
	handle(s, op{
		id: "get-image-usage", method: http.MethodGet, path: "/v1/store/usage", tag: tag, right: v1.RightRead,
		summary: "What images take", text: "In the object store and on each node.",
		errors: []errs.Code{errs.NotSupported, errs.StoreUnavailable, errs.StoreCorrupt, errs.EdgeUnreachable, errs.ConnectionLost},
	}, s.usage)
	handleStream(s, op{
		id: "collect-images", method: http.MethodPost, path: "/v1/store/collect", tag: tag, right: v1.RightImage, body: -1,
		summary: "Remove what no image needs",
		text: "From the object store. What is found unneeded goes after two more passes, which are made at once where listings are never behind, and an hour apart otherwise. " +
			"A line tells of each pass. The server does the same every hour.",
		errors: []errs.Code{errs.StateConflict, errs.NotSupported, errs.StoreUnavailable, errs.StoreCorrupt, errs.EdgeUnreachable, errs.ConnectionLost},
		line:   v1.CollectReport{},
	}, s.collectNow)
	handleStream(s, op{
		id: "warm-image", method: http.MethodPost, path: "/v1/store/warm", tag: tag, right: v1.RightImage, body: -1,
		summary: "Fetch an image in advance",
		text:    "Onto nodes: what the image's first start read, or all of it. Lines tell how far each node is.",
		errors:  []errs.Code{errs.ImageNotFound, errs.NodeNotFound}, line: v1.WarmProgress{},
	}, s.warm)
	handleStream(s, op{
		id: "collapse-image", method: http.MethodPost, path: "/v1/store/collapse", tag: tag, right: v1.RightImage, body: -1,
		summary: "Merge small layers of an image",
		text: "Neighbouring layers of what sandboxes changed, on a node that has the image. Name, digest and contents stay; sandboxes that run keep the layers that they have. " +
			"Lines tell the progress; the last one has the image, or the error. The server does the same by itself for images that lose eight layers or more.",
		errors: []errs.Code{errs.ImageNotFound, errs.ImageCorrupt, errs.StateConflict, errs.NoNode, errs.DiskFull, errs.StoreUnavailable, errs.StoreCorrupt, errs.EdgeUnreachable, errs.ConnectionLost},
		line:   v1.ImageProgress{},
	}, s.collapseNow)
	handle(s, op{
		id: "evict-image", method: http.MethodPost, path: "/v1/store/evict", tag: tag, right: v1.RightImage, body: -1,
		summary: "Drop an image from nodes", text: "It stays in the object store and is fetched again when it is used. What sandboxes use stays.",
		errors: []errs.Code{errs.ImageNotFound, errs.NodeNotFound},
	}, s.evict)
}

func (s *Server) adminRoutes() {
	handle(s, op{
		id: "list-nodes", method: http.MethodGet, path: "/v1/nodes", tag: "nodes", right: v1.RightRead, summary: "List nodes", text: "All registered edges.",
	}, s.listNodes)
	handle(s, op{
		id: "get-node", method: http.MethodGet, path: "/v1/nodes/{id}", tag: "nodes", right: v1.RightRead, summary: "Inspect a node", text: "One registered edge.",
		errors: []errs.Code{errs.NodeNotFound},
	}, s.getNode)
	handle(s, op{
		id: "create-token", method: http.MethodPost, path: "/v1/tokens", tag: "tokens", right: v1.RightAdmin, status: 201,
		summary: "Create a token", text: "The secret is in this answer and nowhere else.", errors: ofStore,
	}, s.createToken)
	handle(s, op{
		id: "list-tokens", method: http.MethodGet, path: "/v1/tokens", tag: "tokens", right: v1.RightAdmin, summary: "List tokens", text: "Without their secrets.",
	}, s.listTokens)
	handle(s, op{
		id: "revoke-token", method: http.MethodDelete, path: "/v1/tokens/{id}", tag: "tokens", right: v1.RightAdmin, status: 204,
		summary: "Revoke a token", text: "It stops working at once here and within a second on other apiservers; connections that it opened end.",
		errors: append([]errs.Code{errs.TokenNotFound}, ofStore...),
	}, s.revokeToken)
	handle(s, op{
		id: "health", method: http.MethodGet, path: "/v1/health", tag: "server", summary: "Health",
		text: "Open to all. `ok` is false if a part is wrong; the status is 503 only if the server can do nothing.",
	}, s.health)
	s.api.OpenAPI().Paths["/v1/health"].Get.Responses["503"] = &huma.Response{
		Description: "The store does not answer.", Content: map[string]*huma.MediaType{"application/json": {Schema: s.schema(v1.Health{})}},
	}
	handleStream(s, op{
		id: "metrics", method: http.MethodGet, path: "/metrics", tag: "server", right: v1.RightRead, summary: "Metrics", text: "In Prometheus' text format.",
	}, s.serveMetrics)
	s.api.OpenAPI().Paths["/metrics"].Get.Responses["200"] = &huma.Response{
		Description: "Metrics.", Content: map[string]*huma.MediaType{"text/plain": {Schema: &huma.Schema{Type: huma.TypeString}}},
	}
}
