package v1

import "time"

// Backend names a kind of isolation.
type Backend string

// Backends. Hollow keeps state and runs nothing: it exists to test the control plane at scale.
const (
	BackendContainer Backend = "container"
	BackendMicroVM   Backend = "microvm"
	BackendFullVM    Backend = "fullvm"
	BackendFnCall    Backend = "fncall"
	BackendHollow    Backend = "hollow"
)

// State of a sandbox (architecture §5).
type State string

// States. Delete is legal in every one.
const (
	StateCreating State = "creating"
	StateRunning  State = "running"
	StatePausing  State = "pausing"  // its processes stand still and its memory is being moved out
	StatePaused   State = "paused"   // a request to it resumes it
	StateResuming State = "resuming" // it is about to run again
	StateStopping State = "stopping"
	StateStopped  State = "stopped"
	StateFailed   State = "failed"
	StateLost     State = "lost"
)

// EndReason says why a sandbox is removed.
type EndReason string

// End reasons.
const (
	EndRequest EndReason = "request" // somebody asked for it
	EndTTL     EndReason = "ttl"     // it reached its time to live
	EndLease   EndReason = "lease"   // nobody renewed its lease
	EndIdle    EndReason = "idle"    // nobody used it for idle_ttl_s
	EndEvicted EndReason = "evicted" // its node was short of memory
)

// Spec says what sandbox is wanted. Zero values mean the defaults of [Spec.SetDefaults].
type Spec struct {
	Backend     Backend           `json:"backend,omitempty" enum:"container,hollow" doc:"Kind of isolation." default:"container"`
	Image       string            `json:"image,omitempty" maxLength:"255" doc:"Name or digest of the base image. Hollow sandboxes need none."`
	Workspace   string            `json:"workspace,omitempty" maxLength:"255" doc:"Name or digest of an image whose layers lie over the base: a repository with what it needs."`
	Toolkits    []string          `json:"toolkits,omitempty" maxItems:"32" doc:"Names or digests of images whose layers lie on top, each over those before it."`
	CPUMillis   int64             `json:"cpu_millis,omitempty" minimum:"0" doc:"CPU limit in thousandths of a core." default:"1000"`
	MemoryBytes int64             `json:"memory_bytes,omitempty" minimum:"0" doc:"Memory limit in bytes." default:"536870912"`
	PIDs        int64             `json:"pids,omitempty" minimum:"0" doc:"Limit of processes and threads." default:"1024"`
	User        string            `json:"user,omitempty" maxLength:"255" doc:"Default user of processes; empty: the image's, else root."`
	WorkDir     string            `json:"work_dir,omitempty" maxLength:"4096" doc:"Default working directory; empty: the image's, else /."`
	Env         map[string]string `json:"env,omitempty" doc:"Environment of every process, over the image's."`
	Hostname    string            `json:"hostname,omitempty" maxLength:"63" doc:"Empty: the sandbox id."`
	Labels      map[string]string `json:"labels,omitempty" doc:"For selection; 'job' groups a job's sandboxes."`
	QoS         QoS               `json:"qos,omitempty" enum:"ls,be" doc:"ls: latency-sensitive, the usual share of the processors. be: best effort, what ls sandboxes leave of them; paused first, and evicted first, when the node is short of memory." default:"ls"`
	Priority    int               `json:"priority,omitempty" minimum:"-1000" maximum:"1000" doc:"Of two sandboxes of a qos, the lower one is evicted first when the node is short of memory." default:"0"`
	IdleTTL     Seconds           `json:"idle_ttl_s,omitempty" minimum:"0" doc:"Seconds without use until on_idle happens: a running command, an attached stream and a connection to a port are use. 0: never; else at least 1, at most 10 years."`
	OnIdle      OnIdle            `json:"on_idle,omitempty" enum:"stop,pause" doc:"What happens after idle_ttl_s: it is removed (if empty, too), or paused until the next request to it."`
	MaxTTL      Seconds           `json:"max_ttl_s,omitempty" minimum:"0" doc:"Seconds until the sandbox is removed, at most 10 years; 0: never."`
	Lease       Seconds           `json:"lease_s,omitempty" minimum:"0" doc:"Seconds that the sandbox outlives whoever renews it: it is removed when its create and the last renewal are longer ago. 0: nobody need renew it; else at least 1, at most 10 years."`
}

// QoS is how a sandbox shares its node with others.
type QoS string

// QoS classes.
const (
	QoSLatency QoS = "ls" // latency-sensitive
	QoSBest    QoS = "be" // best effort
)

// OnIdle is what happens to a sandbox that nobody uses.
type OnIdle string

// What may happen.
const (
	OnIdleStop  OnIdle = "stop"
	OnIdlePause OnIdle = "pause"
)

// PauseReason says why a sandbox is paused.
type PauseReason string

// Pause reasons.
const (
	PauseRequested PauseReason = "request"  // somebody asked for it
	PauseIdle      PauseReason = "idle"     // nobody used it for idle_ttl_s
	PauseHint      PauseReason = "hint"     // its next call was known to be far
	PausePressure  PauseReason = "pressure" // its node was short of memory
)

// Seconds is a duration in whole or fractional seconds.
type Seconds float64

// Duration converts s.
func (s Seconds) Duration() time.Duration { return time.Duration(float64(s) * float64(time.Second)) }

// CreateRequest asks for one or more sandboxes of one spec.
type CreateRequest struct {
	Spec
	SecretEnv map[string]string `json:"secret_env,omitempty" doc:"Environment of every process, over env, that is kept nowhere but in the sandbox: no answer and no event has it, nor has what is made of the sandbox, unless its fork gives it again. It is no part of what an idempotency key stands for."`
	Count     int               `json:"count,omitempty" minimum:"1" maximum:"10000" doc:"How many; answered one by one." default:"1"`
}

// CreateResult is the outcome of one sandbox of a CreateRequest: either is set.
type CreateResult struct {
	Sandbox *Sandbox `json:"sandbox,omitempty"`
	Error   *Problem `json:"error,omitempty"`
}

// ForkRequest asks for children of a sandbox.
type ForkRequest struct {
	Count     int               `json:"count,omitempty" minimum:"1" maximum:"1000" doc:"How many; answered one by one." default:"1"`
	Lease     Seconds           `json:"lease_s,omitempty" minimum:"0" doc:"Lease of each child, as in a create; the source's is its own."`
	SecretEnv map[string]string `json:"secret_env,omitempty" doc:"The children's, as in a create. They have none of the source's."`
	LeaveOut  []string          `json:"leave_out,omitempty" maxItems:"1000" doc:"Patterns of paths that the children must not have, as in a snapshot."`
}

// Sandbox is what the platform says of one sandbox.
type Sandbox struct {
	ID          string             `json:"id"`
	Generation  uint64             `json:"generation" doc:"Grows with every change of state."`
	State       State              `json:"state"`
	Node        string             `json:"node" doc:"Edge that owns it."`
	Spec        Spec               `json:"spec"`
	ImageDigest string             `json:"image_digest,omitempty" doc:"Of the base image."`
	Parts       []ImagePart        `json:"parts,omitempty" doc:"What it is composed of, lowest first; empty: the base image alone."`
	ForkOf      string             `json:"fork_of,omitempty" doc:"Sandbox that it was forked from."`
	CreatedAt   time.Time          `json:"created_at"`
	StartedAt   *time.Time         `json:"started_at,omitempty"`
	EndedAt     *time.Time         `json:"ended_at,omitempty"`
	ExpiresAt   *time.Time         `json:"expires_at,omitempty"`
	PausedAt    *time.Time         `json:"paused_at,omitempty" doc:"While it is paused: since when."`
	PauseReason PauseReason        `json:"pause_reason,omitempty" enum:"request,idle,hint,pressure" doc:"While it is paused: why."`
	Pauses      int64              `json:"pauses,omitempty" doc:"How often it was paused."`
	Error       *Problem           `json:"error,omitempty" doc:"Cause of failed or lost."`
	EndReason   EndReason          `json:"end_reason,omitempty" enum:"request,ttl,lease,idle,evicted" doc:"Why it is or was removed: somebody asked, it reached max_ttl_s, nobody renewed its lease, nobody used it for idle_ttl_s, or its node was short of memory."`
	OOMKills    int64              `json:"oom_kills,omitempty" doc:"Processes that its memory limit has killed, as far as was noticed; usage has the present count."`
	LastOOM     *OOMKill           `json:"last_oom,omitempty" doc:"The last of these of which more than the number is known."`
	CreateMS    float64            `json:"create_ms,omitempty" doc:"Time the edge took to create it, milliseconds."`
	Steps       map[string]float64 `json:"steps_ms,omitempty" doc:"Time of each step of the create, milliseconds."`
	Layers      []LayerCache       `json:"layers,omitempty" doc:"What its node has of its image. Only in the answer for one sandbox."`
	Usage       *Usage             `json:"usage,omitempty" doc:"Only in the answer for one sandbox."`

	// IdempotencyKey is the create's key, kept so that it holds over a restart.
	IdempotencyKey string `json:"idempotency_key,omitempty"`
}

// OOMKill is one process of a sandbox that the kernel killed for want of memory.
type OOMKill struct {
	Time        time.Time `json:"time"`
	Command     string    `json:"command" doc:"Name of the process as the kernel has it, its first 15 bytes."`
	PID         int       `json:"pid,omitempty" doc:"Its number in the sandbox; 0: it was gone before that was known."`
	MemoryBytes int64     `json:"memory_bytes" doc:"That it had."`
	LimitBytes  int64     `json:"limit_bytes,omitempty" doc:"The sandbox's memory limit, which it met. 0: the node ran out of memory."`
}

// Usage of a sandbox, read from its cgroup, and what it used of its node's cache of image data. A
// restart of the server changes none of it; if the server was killed, the latter lacks the last second, and
// sent_bytes and paused_seconds the last ten.
type Usage struct {
	CPUSeconds       float64 `json:"cpu_seconds"`
	MemoryBytes      int64   `json:"memory_bytes"`
	PeakMemoryBytes  int64   `json:"peak_memory_bytes"`
	Processes        int64   `json:"processes"`
	DiskBytes        int64   `json:"disk_bytes" doc:"Written in the sandbox's own layer."`
	OOMKills         int64   `json:"oom_kills"`
	ForksRefused     int64   `json:"forks_refused" doc:"By the limit of processes."`
	SwapBytes        int64   `json:"swap_bytes" doc:"Of its memory, what is swapped out."`
	MemoryGiBSeconds float64 `json:"memory_gib_seconds" doc:"Integral of memory_bytes over its life, GiB·s. It is read with each change of state, whenever somebody asks, and every ten seconds."`
	PausedSeconds    float64 `json:"paused_seconds" doc:"That it was paused, added up."`
	IOReadBytes      int64   `json:"io_read_bytes" doc:"That its processes, those that have ended included, read from disks: also ahead of what they asked for, and from swap. Not what the kernel had in memory, nor what a process read that ended unnoticed since its parent ignores that."`
	IOWrittenBytes   int64   `json:"io_written_bytes" doc:"That its processes wrote to files on disks, counted when it is in memory for that, in whole pages, and not if the file is removed or cut before it is written."`
	SentBytes        int64   `json:"sent_bytes" doc:"That left it: by connections to its ports, output of commands, files, and what the protocol needs for them."`

	ImageReadBytes    int64   `json:"image_read_bytes" doc:"Of its image's data, that the kernel asked the node's cache for on behalf of its processes, read-ahead included. Not seen are reads of what the kernel has in memory, and as a rule of layers that are whole on the node."`
	ImageWaitedBytes  int64   `json:"image_waited_bytes" doc:"Of those, what was not on the node when it was asked for."`
	ImageWaitSeconds  float64 `json:"image_wait_seconds" doc:"That its processes waited for it, added up."`
	ImageFetchedBytes int64   `json:"image_fetched_bytes" doc:"Of its image's data, uncompressed, that were fetched from the object store because it was the first to ask, and ahead of its reads. What is fetched to warm an image, or since earlier starts read it, counts for no sandbox."`
}

// SandboxUsage is what one of several sandboxes uses, or why it cannot be read.
type SandboxUsage struct {
	ID          string            `json:"id"`
	Node        string            `json:"node,omitempty"`
	State       State             `json:"state,omitempty"`
	QoS         QoS               `json:"qos,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	CPUMillis   int64             `json:"cpu_millis,omitempty" doc:"Its limit."`
	MemoryBytes int64             `json:"memory_bytes,omitempty" doc:"Its limit."`
	Usage       *Usage            `json:"usage,omitempty" doc:"Without disk_bytes, which the answer for one sandbox has."`
	Error       *Problem          `json:"error,omitempty"`
}

// NodeUsage is what a node and its sandboxes use at a moment.
type NodeUsage struct {
	Node        Node           `json:"node"`
	At          time.Time      `json:"at" doc:"When it was read."`
	CPUMillis   int64          `json:"cpu_millis" doc:"That the machine has."`
	CPUSeconds  float64        `json:"cpu_seconds" doc:"That its processors were busy since it started, whoever kept them so."`
	MemoryBytes int64          `json:"memory_bytes" doc:"That the machine has."`
	Items       []SandboxUsage `json:"items"`
	Error       *Problem       `json:"error,omitempty" doc:"Why it cannot be read; the items are then without usage."`
}

// UsageList is what sandboxes use, by their nodes.
type UsageList struct {
	Nodes   []NodeUsage    `json:"nodes"`
	Unknown []SandboxUsage `json:"unknown,omitempty" doc:"Ids that were asked for and belong to no node, with the cause."`
}

// SandboxList is a page of sandboxes and the revision it was read at.
type SandboxList struct {
	Revision uint64    `json:"revision" doc:"Watch events from here to miss nothing."`
	Items    []Sandbox `json:"items"`
}

// DeleteRequest selects what to remove: ids, or all with these labels.
type DeleteRequest struct {
	IDs    []string          `json:"ids,omitempty" maxItems:"10000"`
	Labels map[string]string `json:"labels,omitempty"`
}

// DeleteResult is the outcome for one sandbox.
type DeleteResult struct {
	ID    string   `json:"id"`
	Error *Problem `json:"error,omitempty"`
}

// PauseRequest selects what to pause or resume: ids, or all with these labels.
type PauseRequest struct {
	IDs    []string          `json:"ids,omitempty" maxItems:"10000"`
	Labels map[string]string `json:"labels,omitempty"`
}

// PauseResult is the outcome for one sandbox of a pause or a resume.
type PauseResult struct {
	ID         string   `json:"id"`
	State      State    `json:"state,omitempty" doc:"That it is in now."`
	Changed    bool     `json:"changed" doc:"False: it was in that state before."`
	FreedBytes int64    `json:"freed_bytes,omitempty" doc:"Of a pause: what less memory it has."`
	TookMS     float64  `json:"took_ms"`
	Error      *Problem `json:"error,omitempty"`
}

// HintRequest tells when a sandbox will be used next, as far as is known.
type HintRequest struct {
	NextCall Seconds `json:"next_call_s" minimum:"0" doc:"Seconds until the next request to the sandbox. The hint ends with that request, or with the next hint."`
}

// HintResult is what the platform did with a hint, and why: it pauses if holding the memory until the next
// call costs more than the transition (the chapter on resource planning, §11.2.3).
type HintResult struct {
	ID          string   `json:"id"`
	Action      string   `json:"action" enum:"keep,pause"`
	HoldCost    float64  `json:"hold_gib_seconds" doc:"Memory times the seconds until the next call, GiB·s, weighted with what memory is worth now."`
	MoveCost    float64  `json:"move_gib_seconds" doc:"What a pause and a resume cost, in the same unit."`
	MemoryBytes int64    `json:"memory_bytes"`
	Why         string   `json:"why" doc:"The decision in a sentence with its numbers."`
	Sandbox     *Sandbox `json:"sandbox,omitempty"`
}
