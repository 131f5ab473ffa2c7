-- Where the GPU had nothing to do inside a step: the longest gaps between kernels, and the kernels on both sides.
WITH
  steps AS (
    SELECT ts, ts + dur AS until, ROW_NUMBER() OVER (ORDER BY ts) AS step
    FROM slice WHERE category = 'user_annotation' AND name = 'eagle3lab step'
  ),
  made AS (
    SELECT ts, dur, name,
      CASE WHEN name LIKE '%::make@_%' ESCAPE '@' THEN SUBSTR(name, INSTR(name, '::make_') + 7) END AS card
    FROM slice WHERE category = 'kernel'
  ),
  named AS (  -- ours by their card, others by what their names begin with
    SELECT ts, dur, COALESCE(SUBSTR(card, 1, INSTR(card, '::') - 1), SUBSTR(name, 1, 60)) AS name FROM made
  ),
  kernels AS (
    SELECT ts, name, LAG(name) OVER (ORDER BY ts, dur DESC) AS name_before,
      MAX(ts + dur) OVER (ORDER BY ts, dur DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM named
  )
SELECT
  steps.step,
  ROUND((kernels.ts - before) / 1e3, 1) AS gap_us,
  ROUND((before - steps.ts) / 1e3, 1) AS us_into_the_step,
  name_before AS after_kernel,
  name AS before_kernel
FROM kernels JOIN steps ON before >= steps.ts AND kernels.ts <= steps.until
WHERE kernels.ts > before
ORDER BY kernels.ts - before DESC
LIMIT 20;
