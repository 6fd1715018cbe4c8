CREATE TABLE task_audit (
	task_id integer not null, -- 0: the queue as a whole
	seq     integer not null, -- 1, 2, 3 … for each task
	event   text    not null, -- what happened: picked, processing, success …
	at      integer not null, -- Unix ms
	attempt integer, -- the execution that it belongs to
	owner   text, -- the poller that picked the task
	actor   text, -- who did it by hand; null: the queue
	reason  text, -- why it was done by hand
	detail  text, -- JSON: error, class, cause, stack, timings
	primary key (task_id, seq)
) strict, without rowid;

CREATE TABLE task_meta (
	key   text primary key, -- schema_version, poller:<owner>, …
	value text not null
) strict, without rowid;

CREATE TABLE task_outbox (
	id            integer primary key autoincrement, -- never used twice
	event_type    text    not null -- names the handler
	                      check (length(event_type) between 1 and 200),
	status        text    not null default 'pending'
	                      check (status = 'picked' or status = 'success' or status = 'pending'
	                          or status = 'processing' or status = 'retry_wait' or status = 'scheduled'
	                          or status = 'dead_letter' or status = 'skipped' or status = 'cancelled'),
	retry_count   integer not null default 0, -- retries that have been scheduled
	next_run_at   integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- due at, Unix ms
	created_at    integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- Unix ms
	updated_at    integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- last change, Unix ms
	priority      integer not null default 0, -- the higher, the sooner, among tasks of one type
	dedupe_key    text    check (length(dedupe_key) between 1 and 500), -- one live task per key
	group_key     text    check (length(group_key) between 1 and 500), -- one at a time, in order of id
	trace_id      text    not null default (lower(hex(randomblob(16)))),
	max_attempts  integer check (max_attempts > 0), -- null: what the type or the queue says
	expires_at    integer, -- not started later than this, Unix ms; null: never too late
	parent_id     integer, -- the task whose handler enqueued this one
	attempt       integer not null default 0, -- executions begun, less those given back
	fence         integer not null default 0, -- claims, never given back; each write of an attempt carries it
	version       integer not null default 0, -- seq of the last audit row
	lost_count    integer not null default 0, -- executions that ended with their process
	blocked       integer not null default 0, -- 1: waits behind its group's first task
	owner         text, -- the poller that holds the task, while picked or processing
	lease_until   integer, -- the hold ends unless it is renewed, Unix ms
	finished_at   integer, -- when it became success, dead_letter, skipped or cancelled, Unix ms
	last_error    text,
	-- The last column, so that reading the others of a large task doesn't read it.
	payload       text    not null check (json_valid(payload))
) strict;

CREATE TABLE task_stats (
	minute      integer not null, -- Unix minutes
	event_type  text    not null,
	picked      integer not null default 0, -- claims
	success     integer not null default 0,
	retried     integer not null default 0, -- failures that wait for a retry
	dead        integer not null default 0, -- failures that became dead letters
	lost        integer not null default 0, -- executions that ended with their process
	released    integer not null default 0, -- given back or put off, at no cost
	skipped     integer not null default 0,
	cancelled   integer not null default 0,
	wait_ms     integer not null default 0, -- sum over picked: from due to picked
	run_ms      integer not null default 0, -- sum over success, retried and dead: from start to end
	-- Counts by duration: above the bound before, up to this one, in ms.
	wait_1 integer not null default 0, wait_5 integer not null default 0, wait_10 integer not null default 0,
	wait_50 integer not null default 0, wait_100 integer not null default 0, wait_500 integer not null default 0,
	wait_1000 integer not null default 0, wait_5000 integer not null default 0, wait_30000 integer not null default 0,
	wait_120000 integer not null default 0, wait_600000 integer not null default 0, wait_inf integer not null default 0,
	run_1 integer not null default 0, run_5 integer not null default 0, run_10 integer not null default 0,
	run_50 integer not null default 0, run_100 integer not null default 0, run_500 integer not null default 0,
	run_1000 integer not null default 0, run_5000 integer not null default 0, run_30000 integer not null default 0,
	run_120000 integer not null default 0, run_600000 integer not null default 0, run_inf integer not null default 0,
	primary key (minute, event_type)
) strict, without rowid;

CREATE INDEX task_audit_manual on task_audit (at) where actor is not null;

CREATE INDEX task_blocked on task_outbox (event_type) where blocked = 1;

CREATE INDEX task_dead on task_outbox (event_type) where status = 'dead_letter';

CREATE INDEX task_due on task_outbox (event_type, priority desc, next_run_at)
	where status = 'pending' and blocked = 0;

CREATE INDEX task_group on task_outbox (group_key) where group_key is not null and finished_at is null;

CREATE INDEX task_held on task_outbox (owner) where owner is not null;

CREATE UNIQUE INDEX task_key on task_outbox (dedupe_key) where dedupe_key is not null and finished_at is null;

CREATE INDEX task_retry on task_outbox (next_run_at) where status = 'retry_wait';

CREATE INDEX task_scheduled on task_outbox (next_run_at) where status = 'scheduled';

CREATE TRIGGER task_audit_no_delete before delete on task_audit
	when exists (select 1 from task_outbox where id = old.task_id)
begin
	select raise(abort, 'task_audit is append-only while its task exists');
end;

CREATE TRIGGER task_audit_no_update before update on task_audit
begin
	select raise(abort, 'task_audit is append-only');
end;

CREATE TRIGGER task_duplicate before insert on task_outbox
	when new.dedupe_key is not null
begin
	select raise(ignore) where exists (
		select 1 from task_outbox where dedupe_key = new.dedupe_key and finished_at is null);
end;

CREATE VIEW task_trail as
select task_id, seq, event, strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch') as time,
	attempt, owner, actor, reason, detail, at
from (
	select id as task_id, -1 as seq, 'created' as event, created_at as at,
		null as attempt, null as owner, null as actor, null as reason,
		json_object('type', event_type, 'trace_id', trace_id, 'parent_id', parent_id) as detail
	from main.task_outbox
	union all
	select id, 0, case when exists (
			select 1 from main.task_audit where task_id = id and seq = 1 and event = 'queued')
			or version = 0 and (status = 'scheduled' or status = 'pending' and next_run_at > created_at)
		then 'scheduled' else 'queued' end,
		created_at, null, null, null, null, null
	from main.task_outbox
	where not exists (select 1 from main.task_audit where task_id = id and seq = 1 and event = 'scheduled')
	union all
	select task_id, seq, event, at, attempt, owner, actor, reason, detail
	from main.task_audit
)
order by task_id, seq;

-- schema_version 1
